"""Puts packed weights into the graph of a captured function: its linear layers become products with them.

Tracing takes no opaque tensor as a constant and no optional list as an argument, so the layers are traced as they are and
replaced afterwards; the packed weights become one more argument of the graph. Layers that read the same value (queries, keys and values;
gate and up) become one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from headstart.inference.capture.folding import fold
from headstart.inference.capture.graph_builder import GraphBuilder, constant_tensor
from headstart.inference.capture.packed import KINDS, Kind, PackedWeight, pack


class PackedFunction:
    """A traced function with packed weights."""

    def __init__(self, traced: Any, kind: Kind) -> None:
        self.weights: list[PackedWeight] = []
        self.traced = fold(traced, lambda graph: self.weights.extend(use_packed(graph, kind)))
        self._packed = [weight.packed for weight in self.weights]

    @property
    def graph(self) -> Any:
        """The graph, whose last input are the packed weights."""
        return self.traced.graph

    def __call__(self, *inputs: Tensor) -> Any:
        return self.traced(*inputs, self._packed)


def linear_groups(graph: Any, kind: Kind) -> list[list[Any]]:
    """The graph's linear layers with constant weights on the CPU that the kind can multiply, grouped by the value they read."""
    groups: dict[str, list[Any]] = {}
    for node in graph.findAllNodes("aten::linear"):
        weight = constant_tensor(node.inputsAt(1))
        if weight is not None and kind in KINDS.get(weight.dtype, ()) and weight.device.type == "cpu":
            if node.inputsAt(2).node().mustBeNone() or constant_tensor(node.inputsAt(2)) is not None:
                groups.setdefault(node.inputsAt(0).debugName(), []).append(node)
    return list(groups.values())


def use_packed(graph: Any, kind: Kind) -> list[PackedWeight]:
    """Replace linear layers in the graph by packed products; the graph takes the packed weights returned here as its last argument."""
    groups, weights = linear_groups(graph, kind), []
    argument = graph.addInput("packed")
    argument.setType(torch._C.ListType(torch._C.TensorType.get()))
    unpacking = graph.create("prim::ListUnpack", [argument], len(groups))
    graph.prependNode(unpacking)
    for group, packed in zip(groups, list(unpacking.outputs()), strict=True):
        packed.setType(torch._C.TensorType.get())
        biases = [constant_tensor(node.inputsAt(2)) for node in group]
        weights.append(pack([cast(Tensor, constant_tensor(node.inputsAt(1))) for node in group], biases, kind))
        _replace(GraphBuilder(graph, group[0]), group, packed, weights[-1], kind)
    return weights


def _replace(build: GraphBuilder, group: Sequence[Any], packed: Any, weight: PackedWeight, kind: Kind) -> None:
    x, bias = group[0].inputsAt(0), build.constant(weight.bias_N)
    if kind == "onednn":
        scalars = build.node("prim::ListConstruct", [], torch._C.ListType(torch._C.OptionalType(torch._C.NumberType.get())))
        out = build.node("mkldnn::_linear_pointwise", [x, packed, bias, build.constant("none"), scalars, build.constant("")])
    else:   # the kernel reads only the shape of the weight itself, and has to be told the number of rows
        shape = build.constant(torch.zeros(1).expand(sum(weight.sizes), weight.inputs))
        elements = build.node("aten::numel", [x], torch._C.IntType.get())
        rows = build.node("aten::floordiv", [elements, build.constant(weight.inputs)], torch._C.IntType.get())
        out = build.node("mkl::_mkl_linear", [x, packed, shape, bias, rows])
    outs = [out] if len(group) == 1 else build.parts(out, weight.sizes)
    for node, value in zip(group, outs, strict=True):
        node.output().replaceAllUsesWith(value)
        node.destroy()
