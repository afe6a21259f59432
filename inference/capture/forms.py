"""Which form of linear layers is fastest on this machine: with packed weights, in transposed layout for few rows, or torch's own.

Timed once for a module's shapes, in captured functions, after the weights were evicted from the CPU caches as in a forward pass.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.inference.capture.folding import fold, trace
from headstart.inference.capture.linear import EVICTION, max_transposed_rows, timed_weights
from headstart.inference.capture.packed import Kind, available
from headstart.inference.capture.products import PackedFunction

ROWS = (1, 12)
"""A plain step and a tree: packed weights are used if both together take less time with them."""
ROUNDS = 6
MIN_GAIN = 0.95
"""Packed weights are used if the products take at most this share of their time without."""
MEMORY_SHARE = 0.25
"""Packed weights are used if they take at most this share of the machine's memory."""
_KNOWN: dict[Any, Kind | None] = {}


@dataclass(frozen=True)
class Form:
    """The form of a module's linear layers."""

    packed: Kind | None = None
    transposed_rows: int = 0
    """Without packed weights: the largest number of rows at which the transposed layout is used."""


def fastest_form(module: nn.Module | None) -> Form:
    """The form of linear layers that is fastest for this module on this machine."""
    if module is None:
        return Form()
    kind = fastest_kind(module)
    return Form(kind) if kind is not None else Form(None, max_transposed_rows(module))


def fastest_kind(module: nn.Module) -> Kind | None:
    """The kind of packed weights that is fastest; None: no kind is faster than without, or they would take too much memory."""
    weights = timed_weights(module)
    if not weights or _bytes(module) > MEMORY_SHARE * _memory():
        return None
    key = (torch.get_num_threads(), weights[0].dtype, tuple(tuple(weight.shape) for weight in weights))
    if key not in _KNOWN:
        _KNOWN[key] = _measure(weights)
    return _KNOWN[key]


@torch.no_grad()
def _measure(weights: Sequence[Tensor]) -> Kind | None:
    with torch.jit.optimized_execution(False):
        example = [torch.ones(2, weight.shape[1], dtype=weight.dtype) for weight in weights]
        traced = trace(lambda *inputs: tuple(map(F.linear, inputs, weights)), example)
        ways: dict[Kind | None, Callable[..., Any]] = {None: fold(traced)}
        ways |= {kind: PackedFunction(traced, kind) for kind in available(weights[0].dtype)}
        totals = dict.fromkeys(ways, 0.0)
        for rows in ROWS:
            for kind, seconds in _least(ways, [torch.ones(rows, one.shape[1], dtype=one.dtype) for one in weights]).items():
                totals[kind] += seconds
    best = min(totals, key=lambda kind: totals[kind])
    return best if totals[best] < MIN_GAIN * totals[None] else None


def _least(ways: dict[Kind | None, Callable[..., Any]], inputs: Sequence[Tensor]) -> dict[Kind | None, float]:
    """The least seconds of each, in turns, so that a disturbance affects all."""
    least, eviction = dict.fromkeys(ways, math.inf), torch.ones(EVICTION)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter   # on a busy machine only the former is steady
    for _ in range(ROUNDS):
        for kind, way in ways.items():
            eviction.sum()
            start = clock()
            way(*inputs)
            least[kind] = min(least[kind], clock() - start)
    return least


def _bytes(module: nn.Module) -> int:
    """Bytes of the module's linear weights."""
    return sum(one.weight.nbytes for one in module.modules() if isinstance(one, nn.Linear))


def _memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
