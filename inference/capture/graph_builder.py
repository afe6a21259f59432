"""Inserts nodes into graphs of traced functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class GraphBuilder:
    """Inserts nodes before a node of a graph."""

    def __init__(self, graph: Any, before: Any) -> None:
        self.graph, self.before = graph, before

    def node(self, kind: str, inputs: Sequence[Any], of_type: Any = None) -> Any:
        """Insert a node and return its output: a tensor, unless another type is given."""
        node = self.graph.create(kind, list(inputs), 1)
        node.insertBefore(self.before)
        node.output().setType(of_type or torch._C.TensorType.get())
        return node.output()

    def constant(self, value: Any) -> Any:
        """Insert a constant and return it."""
        with self.graph.insert_point_guard(self.before):
            return self.graph.insertConstant(value)

    def tensors(self, *values: Any) -> Any:
        """Insert a list of tensors."""
        return self.node("prim::ListConstruct", values, torch._C.ListType(torch._C.TensorType.get()))

    def parts(self, value: Any, sizes: Sequence[int]) -> list[Any]:
        """Insert views of the parts of the last dimension."""
        tensors = torch._C.ListType(torch._C.TensorType.get())
        split = self.node("aten::split_with_sizes", [value, self.constant(list(sizes)), self.constant(-1)], tensors)
        node = self.graph.create("prim::ListUnpack", [split], len(sizes))
        node.insertBefore(self.before)
        outputs = list(node.outputs())
        for output in outputs:
            output.setType(torch._C.TensorType.get())
        return outputs


def constant_tensor(value: Any) -> Tensor | None:
    """The tensor if a graph's value is a constant one."""
    if value.node().kind() != "prim::Constant" or value.node().mustBeNone():
        return None
    held = value.toIValue()
    return held if isinstance(held, Tensor) else None
