"""Backend ``trace``: TorchScript on a CPU, with packed weights. For passes that are not compiled: where there is no C++ compiler, or
nothing was compiled, and of kinds that are not compiled (`not_compilable`).

A small model spends most of a forward pass in Python, launching some hundred operations; replaying them from a trace takes half the time.
A trace works for new sizes without retracing. `torch.jit.trace` is not used: it keeps the graph of every trace, some MB of a model's
forward pass, until the process ends.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache, cached_property
from typing import Any, cast

import torch
from torch import Tensor

from headstart.heads.backbone.tree_attention import LONG
from headstart.inference.capture.backend import Backend, Call, Capture, Flat, Function, sizes_of_one
from headstart_cpu.packed import fits_in_memory
from headstart_cpu.traced_products import ProductFunction

PASSES = ("_jit_pass_dce", "_jit_pass_cse")
TYPES = ("ListType", "NumberType", "OptionalType", "TensorType")
KEYS = ("DispatchKey", "DispatchKeySet", "_ExcludeDispatchKeyGuard")
PRIVATE = (*PASSES, "_create_graph_by_tracing", "_create_function_from_graph", *TYPES, *KEYS)
"""Names of `torch._C` with which graphs are made, changed and run, here and in products.py; they may change between releases."""


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
        if missing := [f"torch._C.{name}" for name in PRIVATE if getattr(torch._C, name, None) is None]:
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
            captured = _Traced(function, call, True, self.same_bits)
            if not (captured.packed or self.same_bits) or captured.compare(function, call) is not None:
                return captured
        captured = _Traced(function, call, False, self.same_bits)
        if self.same_bits and captured.compare(function, call) is None:
            raise ValueError("a trace rounds otherwise on this processor")
        return captured


class _Traced(Capture):
    def __init__(self, function: Function, call: Call, packed: bool, same_bits: bool) -> None:
        super().__init__(same_bits)
        flat = Flat(inspect.unwrap(function), call)  # linear layers are replaced afterwards, so without the products of the wrapper
        self.traced = ProductFunction(trace(flat, call.leaves), packed)
        self.build = flat.build

    @property
    def packed(self) -> bool:
        """True if linear layers of the function have packed weights."""
        return bool(self.traced.weights)

    def __call__(self, call: Call) -> Any:
        # TorchScript's own optimisation costs half a second at the first replay and does not make later ones faster.
        with torch.jit.optimized_execution(False), _untracked():
            return self.build(iter(self.traced(*call.leaves)))


def trace(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Any:
    """The graph of the function's operations as called with these inputs."""
    passes = cast(Any, torch._C)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # of branches on sizes: see `Capture.compare`
        graph, _ = passes._create_graph_by_tracing(function, tuple(inputs), lambda value: "", True, False, None, [])
    return graph


def _untracked() -> Any:
    """A context without autograd's bookkeeping of views and in-place writes, which `torch.no_grad` keeps: a tenth of a small model's step.

    So has `torch.inference_mode`, but its tensors cannot be changed in place outside, as logits processors do.
    """
    passes = cast(Any, torch._C)
    return passes._ExcludeDispatchKeyGuard(_tracking())


@cache
def _tracking() -> Any:
    passes = cast(Any, torch._C)
    key, keys = passes.DispatchKey, passes.DispatchKeySet
    return keys(key.ADInplaceOrView) | keys(key.AutogradFunctionality) | keys(key.AutogradOther)
