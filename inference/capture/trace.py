"""Backend ``trace``: `torch.jit.trace` on a CPU, with size arithmetic folded and linear layers of few rows in transposed layout.

A small model spends most of a forward pass in Python, launching some hundred operations; replaying them from a trace takes a half to a
third of the time. A trace works for new sizes without retracing.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from headstart.inference.capture.backend import Backend, Call, Capture, Function, sizes_of_one
from headstart.inference.capture.folding import expected_warnings, fold, missing_functions
from headstart.inference.capture.linear import TransposedLinear, layout, max_transposed_rows
from headstart.support.pytree import builder, flatten


class Trace(Backend):
    """TorchScript traces; linear layers use the layout that is faster for their number of rows on this machine."""

    name = "trace"

    def __init__(self, module: nn.Module | None) -> None:
        super().__init__(module)
        self._max_rows: int | None = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"traces are for the CPU; the model is on {device.type}"
        version = f"torch {torch.__version__}"
        if sys.version_info >= (3, 14):
            return "torch.jit does not support Python 3.14 and later"
        if not all(callable(getattr(getattr(torch, "jit", None), name, None)) for name in ("trace", "optimized_execution")):
            return f"{version} has no torch.jit.trace"
        if missing := missing_functions():
            return f"{version} lacks {', '.join(missing)}, with which traces are folded"
        return None

    def variant(self, call: Call) -> Hashable:
        rows = call.leaves[call.held_leaves].numel()
        return layout(rows, self._max_transposed_rows()), sizes_of_one(call.shapes)

    def capture(self, function: Function, call: Call) -> Capture:
        return _Traced(function, call, self._max_transposed_rows())

    def _max_transposed_rows(self) -> int:
        if self._max_rows is None:
            self._max_rows = 0 if self.module is None else max_transposed_rows(self.module)
        return self._max_rows


class _Traced(Capture):
    def __init__(self, function: Function, call: Call, max_rows: int) -> None:
        super().__init__()
        out: Any = None

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            nonlocal out
            held, inputs = call.arguments(tensors)
            results: list[Tensor] = []
            out = flatten(function(held, *inputs), results)
            return tuple(results)

        with expected_warnings(), TransposedLinear(max_rows):
            self.traced = fold(torch.jit.trace(flat, tuple(call.leaves), check_trace=False))
        self.build = builder(out)

    def __call__(self, call: Call) -> Any:
        # TorchScript's own optimisation costs half a second at the first replay and does not make later ones faster.
        with torch.jit.optimized_execution(False):
            return self.build(iter(self.traced(*call.leaves)))
