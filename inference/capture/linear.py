"""Linear layers in transposed layout, ``(W x^T)^T`` instead of ``x W^T``, for the numbers of rows at which that is faster on this machine.

A decoding step multiplies every weight with few rows (one per node). On many CPUs one layout takes up to twice as long as the other,
most of all for the single row of an autoregressive step, which is fastest as two products with half of the weight each. The sums are
the same; their rounding may differ in the last bit, as it does between different numbers of rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headstart.inference.capture.folding import fold, trace

ROWS = (1, 2, 4, 8, 16)
"""Numbers of rows that are timed."""
TIMED_WEIGHTS, EVICTION = 4 << 20, 8 << 20
"""Elements of the timed weights, and of a buffer read before each timing to evict them from the CPU caches, as in a forward pass."""
ROUNDS = 6
_KNOWN: dict[Any, int] = {}


class TransposedLinear(TorchFunctionMode):
    """A mode in which linear layers with at most ``max_rows`` rows are computed in transposed layout.

    A trace keeps the layout it was made with: it is fast for numbers of rows of the same `layout` and slower for others, and
    a trace made for one row raises an error when called with more.
    """

    def __init__(self, max_rows: int) -> None:
        super().__init__()
        self.max_rows = max_rows

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is F.linear and len(args) >= 2 and not kwargs and args[1].dtype == torch.float32:
            if layout(_rows(args[0]), self.max_rows):
                return transposed_linear(*args)
        return func(*args, **(kwargs or {}))


def layout(rows: int, max_rows: int) -> int:
    """The layout for that number of rows: 0 torch's, 1 transposed, 2 transposed for a single row."""
    return 0 if rows > max_rows else 1 + (rows == 1)


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(x, weight, bias)``: ``[..., K]``, ``[N, K]`` -> ``[..., N]``."""
    N, K = map(int, weight.shape)
    x_KR = x.reshape(-1, K).t()
    if _rows(x) > 1:
        out = torch.mm(weight, x_KR).t().contiguous()
    elif N % 2:   # matrix-vector kernels are slower than products with two columns
        out = torch.mm(weight, torch.cat([x_KR, x_KR], 1))[:, :1].contiguous()
    else:         # and slower than a batch of two half-size products
        out = torch.bmm(weight.reshape(2, -1, K), x_KR.expand(2, K, 1))
    out = out.view(*x.shape[:-1], N)
    return out if bias is None else out + bias


def _rows(x: Tensor) -> int:
    return math.prod(map(int, x.shape[:-1]))   # int() keeps it an integer while tracing


def max_transposed_rows(module: nn.Module) -> int:
    """The largest number of rows at which the transposed layout is faster with this module's weights on this machine; timed once."""
    weights = [weight for weight in timed_weights(module) if weight.dtype == torch.float32]
    key = (torch.get_num_threads(), tuple(tuple(weight.shape) for weight in weights))
    if key not in _KNOWN:
        _KNOWN[key] = _measure(weights) if weights else 0
    return _KNOWN[key]


def timed_weights(module: nn.Module) -> list[Tensor]:
    """Weights ``[N, K]`` of the module's linear layers on the CPU, in its first layer's dtype (fp32 or bf16): on them forms are timed.

    Up to `TIMED_WEIGHTS` elements.
    """
    layers = [one.weight for one in module.modules() if isinstance(one, nn.Linear) and one.weight.dtype in (torch.float32, torch.bfloat16)]
    weights, total = [], 0
    for weight in layers:
        if weight.dtype == layers[0].dtype and weight.device.type == "cpu" and total < TIMED_WEIGHTS:
            weights.append(weight.detach())
            total += weight.numel()
    return weights


@torch.no_grad()
def _measure(weights: Sequence[Tensor]) -> int:
    max_rows, eviction = 0, torch.ones(EVICTION)
    for rows in ROWS:
        inputs = [torch.ones(rows, weight.shape[1]) for weight in weights]
        layouts = [_traced(function, inputs, weights) for function in (F.linear, transposed_linear)]
        best = [float("inf")] * 2
        for _ in range(ROUNDS):   # interleaved, so that a disturbance affects both
            for i, traced in enumerate(layouts):
                eviction.sum()
                start = time.perf_counter()
                traced(*inputs)
                best[i] = min(best[i], time.perf_counter() - start)
        if best[1] > 0.97 * best[0]:
            break
        max_rows = rows
    return max_rows


def _traced(function: Callable[..., Tensor], inputs: list[Tensor], weights: Sequence[Tensor]) -> Callable[..., Any]:
    """One trace of all products, as a captured forward pass computes them."""
    with torch.jit.optimized_execution(False):
        traced = fold(trace(lambda *inputs: tuple(map(function, inputs, weights)), inputs))
        traced(*inputs)
    return traced
