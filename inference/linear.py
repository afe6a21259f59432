"""Linear layers of few rows, turned round where this machine is faster at that: ``(W x^T)^T`` in place of ``x W^T``.

A decoding pass multiplies every weight with the rows of a few nodes. On many CPUs the product takes up to twice as long one way round as
the other, most of all for the single row of a plain step, which is best taken twice. The sums are the same, their rounding may differ
in the last bit, as it does between one number of rows and another.
"""

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ROWS = (1, 2, 4, 8, 16)
"""Numbers of rows that are timed."""
SAMPLE = 8 << 20
"""Weights to time with, in numbers; and as many others are read before each time, since a pass finds its weights out of the caches."""
ROUNDS = 5
_KNOWN: dict[Any, int] = {}


class Turned(TorchFunctionMode):
    """While it is on, linear layers of at most ``most`` rows are turned round; in a `torch.jit.trace`, whatever rows come later."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.linear and len(args) >= 2 and not kwargs and args[1].dtype == torch.float32 and self.most:
            return _scripted()(args[0], args[1], args[2] if len(args) > 2 else None, self.most)
        return func(*args, **(kwargs or {}))


def turned(x: Tensor, weight: Tensor, bias: Tensor | None, most: int) -> Tensor:
    """``F.linear(x, weight, bias)``: ``[..., K]``, ``[N, K]`` -> ``[..., N]``."""
    rows = x.numel() // x.size(-1)
    if rows > most:
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, x.size(-1))
    if rows == 1:   # products with vectors have kernels of their own, slower than those for two
        out = torch.mm(weight, torch.cat([flat, flat]).t())[:, :1]
    else:
        out = torch.mm(weight, flat.t())
    out = out.t().contiguous().view(list(x.shape[:-1]) + [weight.size(0)])
    return out if bias is None else out + bias


@functools.cache
def _scripted() -> Any:
    """With its branch on the number of rows, which a trace alone would not keep."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")   # that TorchScript will end: where it has, nothing is recorded (see `capture`)
        return torch.jit.script(turned)


def turned_up_to(module: nn.Module) -> int:
    """The number of rows up to which turning is faster with this module's weights on this machine; 0: it never is. Timed once."""
    weights = _sample(module)
    key = (torch.get_num_threads(), tuple(tuple(weight.shape) for weight in weights))
    if key not in _KNOWN:
        _KNOWN[key] = _measure(weights) if weights else 0
    return _KNOWN[key]


def _sample(module: nn.Module) -> list[Tensor]:
    layers = [one.weight for one in module.modules() if isinstance(one, nn.Linear)]
    wanted, total = [], 0
    for weight in layers:
        if weight.dtype == torch.float32 and weight.device.type == "cpu" and total < SAMPLE:
            wanted.append(weight.detach())
            total += weight.numel()
    return wanted


@torch.no_grad()
def _measure(weights: Sequence[Tensor]) -> int:
    most, others = 0, torch.ones(SAMPLE)
    for rows in ROWS:
        given = {width: torch.ones(rows, width) for width in {weight.shape[1] for weight in weights}}
        best = [float("inf")] * 2
        for _ in range(ROUNDS):   # in turns, so that a disturbance meets both
            for i, most_turned in enumerate((0, ROWS[-1])):
                others.sum()
                start = time.perf_counter()
                for weight in weights:
                    _scripted()(given[weight.shape[1]], weight, None, most_turned)
                best[i] = min(best[i], time.perf_counter() - start)
        if best[1] > 0.97 * best[0]:
            break
        most = rows
    return most
