"""Backend ``trace``: TorchScript on a CPU, with size arithmetic folded and linear layers in the form that is fastest here.

A small model spends most of a forward pass in Python, launching some hundred operations; replaying them from a trace takes a half to a
third of the time. A trace works for new sizes without retracing.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch

from headstart.inference.capture.backend import Backend, Call, Capture, Flat, Function, sizes_of_one
from headstart.inference.capture.folding import fold, missing_functions, trace, untracked
from headstart.inference.capture.forms import Form, fastest_form
from headstart.inference.capture.linear import TransposedLinear, layout
from headstart.inference.capture.products import PackedFunction

LONG = 1024
"""Caches of more positions than this are captured apart, again at every doubling: attention takes their keys in more blocks."""


class Trace(Backend):
    """TorchScript traces; linear layers have packed weights, or the layout that is faster for their number of rows on this machine."""

    name = "trace"
    spot_checks = False   # what is replayed was compared at smaller and at larger sizes

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
    def form(self) -> Form:
        """The form of linear layers, chosen when the first function is captured."""
        return fastest_form(self.module)

    def variant(self, call: Call) -> Hashable:
        rows = call.leaves[call.held_leaves].numel()
        longest = max((size for shape in call.shapes[: call.held_leaves] for size in shape), default=1)   # of a cache: its positions
        return layout(rows, self.form.transposed_rows), (longest // LONG).bit_length(), sizes_of_one(call.shapes)

    def capture(self, function: Function, call: Call) -> Capture:
        if self.form.packed is not None:
            captured = _Traced(function, call, self.form)
            if not captured.packed or captured.compare(function, call) is not None:
                return captured
        return _Traced(function, call, Form(None, self.form.transposed_rows))


class _Traced(Capture):
    def __init__(self, function: Function, call: Call, form: Form) -> None:
        super().__init__()
        flat = Flat(function, call)
        with TransposedLinear(form.transposed_rows) if form.transposed_rows else nullcontext():
            traced = trace(flat, call.leaves)
        self.traced = fold(traced) if form.packed is None else PackedFunction(traced, form.packed)
        self.build = flat.build

    @property
    def packed(self) -> bool:
        """True if linear layers of the function have packed weights."""
        return isinstance(self.traced, PackedFunction) and bool(self.traced.weights)

    def __call__(self, call: Call) -> Any:
        # TorchScript's own optimisation costs half a second at the first replay and does not make later ones faster.
        with torch.jit.optimized_execution(False), untracked():
            return self.build(iter(self.traced(*call.leaves)))
