"""Linear layers of few rows, turned round where this machine is faster at that: ``(W x^T)^T`` in place of ``x W^T``.

A decoding pass multiplies every weight with the rows of a few nodes. On many CPUs the product takes up to twice as long one way round as
the other, most of all for the single row of a plain step, which is best multiplied with both halves of the weight at once. The sums are
the same, their rounding may differ in the last bit, as it does between one number of rows and another.
"""

import math
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
SAMPLE, OTHERS = 4 << 20, 8 << 20
"""Weights to time with, in numbers; and how many others are read before each time, since a pass finds its weights out of the caches."""
ROUNDS = 6
_KNOWN: dict[Any, int] = {}


class TransposedLinear(TorchFunctionMode):
    """While it is on, linear layers of at most ``most`` rows are turned round.

    A `torch.jit.trace` keeps the way that was taken: fast for rows of the same `way`, slower but right for others, or, taken for one row
    and met by more, an error.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.linear and len(args) >= 2 and not kwargs and args[1].dtype == torch.float32:
            if way(_rows(args[0]), self.most):
                return turned(*args)
        return func(*args, **(kwargs or {}))


def way(rows: int, most: int) -> int:
    """Which way linear layers of so many rows are taken: 2 one row turned round, 1 a few, 0 as they are."""
    return 0 if rows > most else 1 + (rows == 1)


def turned(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(x, weight, bias)``: ``[..., K]``, ``[N, K]`` -> ``[..., N]``."""
    N, K = map(int, weight.shape)
    turned_KR = x.reshape(-1, K).t()
    if _rows(x) > 1:
        out = torch.mm(weight, turned_KR).t().contiguous()
    elif N % 2:   # products with one vector have kernels of their own, slower than those for two
        out = torch.mm(weight, torch.cat([turned_KR, turned_KR], 1))[:, :1].contiguous()
    else:         # and slower than two products at once
        out = torch.bmm(weight.reshape(2, -1, K), turned_KR.expand(2, K, 1))
    out = out.view(*x.shape[:-1], N)
    return out if bias is None else out + bias


def _rows(x: Tensor) -> int:
    return math.prod(map(int, x.shape[:-1]))   # a number in a trace too


def max_transposed_rows(module: nn.Module) -> int:
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
    most, others = 0, torch.ones(OTHERS)
    for rows in ROWS:
        given = [torch.ones(rows, weight.shape[1]) for weight in weights]
        ways = [_recorded(function, given, weights) for function in (F.linear, turned)]
        best = [float("inf")] * 2
        for _ in range(ROUNDS):   # in turns, so that a disturbance meets both
            for i, recorded in enumerate(ways):
                others.sum()
                start = time.perf_counter()
                recorded(given)
                best[i] = min(best[i], time.perf_counter() - start)
        if best[1] > 0.97 * best[0]:
            break
        most = rows
    return most


def _recorded(function: Callable[..., Tensor], given: list[Tensor], weights: Sequence[Tensor]) -> Callable[[list[Tensor]], Any]:
    """Products of all of them, as a recording takes them."""

    def products(given: list[Tensor]) -> list[Tensor]:
        return [function(x, weight) for x, weight in zip(given, weights, strict=True)]

    with warnings.catch_warnings(), torch.jit.optimized_execution(False):
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(products, (given,), check_trace=False)
        traced(given)
    return traced
