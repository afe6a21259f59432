"""The graph of a `torch.jit.trace` without what only Python needed: a trace follows every size through tensors of one number.

Of the nodes of a model's pass three quarters are such arithmetic, in which a single row's pass spends a sixth of its time.
"""

from __future__ import annotations

from typing import Any, cast

import torch


def folded(traced: Any) -> Any:
    """The same function of the same tensors, for any sizes the trace follows, by fewer nodes."""
    graph, passes = traced.graph.copy(), cast(Any, torch._C)
    passes._jit_pass_inline(graph)
    _by_numbers(graph)
    passes._jit_pass_dce(graph)
    passes._jit_pass_constant_pooling(graph)
    passes._jit_pass_constant_propagation(graph)
    passes._jit_pass_cse(graph)
    return passes._create_function_from_graph("pass", graph)


def _by_numbers(graph: Any) -> None:
    """Sizes, and shares of them, as rotary embeddings take the half of a head, by numbers in place of tensors."""
    for node in graph.findAllNodes("aten::Int"):
        source = node.inputsAt(0).node()
        if source.kind() == "prim::NumToTensor":
            node.output().replaceAllUsesWith(source.inputsAt(0))
        elif source.kind() == "aten::floor_divide" and source.inputsAt(0).node().kind() == "prim::NumToTensor":
            size, by = source.inputsAt(0).node().inputsAt(0), _number(graph, node, "aten::Int", source.inputsAt(1))
            node.output().replaceAllUsesWith(_number(graph, node, "aten::floordiv", size, by))


def _number(graph: Any, before: Any, kind: str, *inputs: Any) -> Any:
    """What a new node of that kind gives, an int."""
    node = graph.create(kind, list(inputs), 1)
    node.insertBefore(before)
    node.output().setType(torch._C.IntType.get())
    return node.output()
