"""Backend ``trace``: TorchScript on a CPU, with size arithmetic folded and linear layers with packed weights.

A small model spends most of a forward pass in Python, launching some hundred operations; replaying them from a trace takes a half to a
third of the time. A trace works for new sizes without retracing.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from functools import cached_property
from typing import Any

import torch

from headstart.heads.backbone.tree_attention import LONG
from headstart.inference.capture.backend import Backend, Call, Capture, Flat, Function, sizes_of_one
from headstart.inference.capture.folding import missing_functions, trace, untracked
from headstart.inference.capture.packed import fits_in_memory
from headstart.inference.capture.products import ProductFunction


class Trace(Backend):
    """TorchScript traces; linear layers have packed weights if there is memory for them."""

    name = "trace"
    spot_checks = False  # what is replayed was compared at smaller and at larger sizes

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"traces are for the CPU; the model is on {device.type}"
        version = f"torch {torch.__version__}"
        if sys.version_info >= (3, 14):
            return "torch.jit does not support Python 3.14 and later"
        if getattr(getattr(torch, "jit", None), "optimized_execution", None) is None:
            return f"{version} has no torch.jit.optimized_execution"
        if missing := missing_functions():
            return f"{version} lacks {', '.join(missing)}, with which traces are made"
        return None

    @cached_property
    def packed(self) -> bool:
        """True if linear layers have packed weights; determined when the first function is captured."""
        return fits_in_memory(self.module)

    def variant(self, call: Call) -> Hashable:
        # Attention takes the keys of longer caches in more blocks.
        longest = max((size for shape in call.shapes[: call.held_leaves] for size in shape), default=1)  # of a cache: its positions
        return (longest // LONG).bit_length(), sizes_of_one(call.shapes)

    def capture(self, function: Function, call: Call) -> Capture:
        if self.packed:
            captured = _Traced(function, call, packed=True)
            if not captured.packed or captured.compare(function, call) is not None:
                return captured
        return _Traced(function, call, packed=False)


class _Traced(Capture):
    def __init__(self, function: Function, call: Call, packed: bool) -> None:
        super().__init__()
        flat = Flat(function, call)
        self.traced = ProductFunction(trace(flat, call.leaves), packed)
        self.build = flat.build

    @property
    def packed(self) -> bool:
        """True if linear layers of the function have packed weights."""
        return bool(self.traced.weights)

    def __call__(self, call: Call) -> Any:
        # TorchScript's own optimisation costs half a second at the first replay and does not make later ones faster.
        with torch.jit.optimized_execution(False), untracked():
            return self.build(iter(self.traced(*call.leaves)))
