"""Graphs of traced functions, folded: size arithmetic on one-element tensors is replaced by integer arithmetic.

Three quarters of the nodes in the trace of a model's forward pass are such arithmetic; a pass over a single row spends a sixth of its
time in it.

`torch.jit.trace` is not used: it keeps the graph of every trace, some MB of a model's forward pass, until the process ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from headstart.inference.capture.norms import use_layer_norms

PASSES = ("inline", "dce", "constant_pooling", "constant_propagation", "cse")
TYPES = ("IntType", "ListType", "NumberType", "OptionalType", "TensorType")
KEYS = ("DispatchKey", "DispatchKeySet", "_ExcludeDispatchKeyGuard")
PRIVATE = (*(f"_jit_pass_{name}" for name in PASSES), "_create_graph_by_tracing", "_create_function_from_graph", *TYPES, *KEYS)
"""Names of `torch._C` with which graphs are made, changed and run, here and in products.py; they may change between releases."""


def missing_functions() -> list[str]:
    """The private names that are missing in this torch."""
    return [f"torch._C.{name}" for name in PRIVATE if getattr(torch._C, name, None) is None]


def trace(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> Any:
    """The graph of the function's operations as called with these inputs."""
    passes = cast(Any, torch._C)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # of branches on sizes: see `Capture.compare`
        graph, _ = passes._create_graph_by_tracing(function, tuple(inputs), lambda value: "", True, False, None, [])
    return graph


def untracked() -> Any:
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


def fold(traced: Any, change: Callable[[Any], None] = lambda graph: None) -> Any:
    """Return a function with fewer nodes than the graph, valid for the same sizes. ``change`` may change a copy of the graph too."""
    graph, passes = traced.copy(), cast(Any, torch._C)
    passes._jit_pass_inline(graph)
    _use_integers(graph)
    _drop_casts(graph)
    change(graph)
    passes._jit_pass_dce(graph)
    passes._jit_pass_constant_propagation(graph)
    use_layer_norms(graph)
    passes._jit_pass_constant_pooling(graph)
    passes._jit_pass_cse(graph)
    return passes._create_function_from_graph("pass", graph)


def _use_integers(graph: Any) -> None:
    """Compute sizes and quotients of them (half of a head in rotary embeddings) as integers instead of tensors."""
    for node in graph.findAllNodes("aten::Int"):
        source = node.inputsAt(0).node()
        if source.kind() == "prim::NumToTensor":
            node.output().replaceAllUsesWith(source.inputsAt(0))
        elif source.kind() == "aten::floor_divide" and source.inputsAt(0).node().kind() == "prim::NumToTensor":
            size, divisor = source.inputsAt(0).node().inputsAt(0), _integer(graph, node, "aten::Int", source.inputsAt(1))
            node.output().replaceAllUsesWith(_integer(graph, node, "aten::floordiv", size, divisor))


def _drop_casts(graph: Any) -> None:
    """Drop conversions of tensors to the dtype and device that they have, which also keep equal operations after them from being merged."""
    for node in graph.findAllNodes("aten::to"):
        before, after = node.inputsAt(0), node.output()
        kept = [(value.type().dtype(), value.type().device()) for value in (before, after)]
        copied = list(node.inputs())[-2].toIValue()
        if None not in kept[0] and kept[0] == kept[1] and copied is False:
            after.replaceAllUsesWith(before)
            node.destroy()


def _integer(graph: Any, before: Any, kind: str, *inputs: Any) -> Any:
    """Insert a node of that kind and return its integer output."""
    node = graph.create(kind, list(inputs), 1)
    node.insertBefore(before)
    node.output().setType(torch._C.IntType.get())
    return node.output()
