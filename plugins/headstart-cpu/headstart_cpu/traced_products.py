"""Puts oneDNN's products into the graph of a captured function in place of its linear layers, with packed weights if there is memory.

Tracing takes no opaque tensor as a constant and no optional list as an argument, so the layers are traced as they are and
replaced afterwards; the packed weights become one more argument of the graph. Layers that read the same value (queries, keys and values;
gate and up) become one product with packed weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from headstart.inference.capture import onednn
from headstart_cpu.packed import PackedWeight, pack


class ProductFunction:
    """A traced function with oneDNN's products; ``packed``: with packed weights."""

    def __init__(self, traced: Any, packed: bool) -> None:
        graph, passes = traced.copy(), cast(Any, torch._C)
        self.weights = use_products(graph, packed)
        passes._jit_pass_dce(graph)
        passes._jit_pass_cse(graph)
        self.traced = passes._create_function_from_graph("pass", graph)
        self._packed = [weight.packed for weight in self.weights]

    @property
    def graph(self) -> Any:
        """The graph, whose last input are the packed weights."""
        return self.traced.graph

    def __call__(self, *inputs: Tensor) -> Any:
        return self.traced(*inputs, self._packed)


class Layer(NamedTuple):
    """A linear layer of a graph, and where its inputs are among its node's; values change when other layers are replaced.

    ``transposed``: the weight is ``[K, N]``.
    """

    node: Any
    places: tuple[int, int, int] = (0, 1, 2)
    transposed: bool = False

    @property
    def x(self) -> Any:
        return self.node.inputsAt(self.places[0])

    @property
    def weight(self) -> Any:
        return self.node.inputsAt(self.places[1])

    @property
    def bias(self) -> Any:
        return self.node.inputsAt(self.places[2])

    def packable(self) -> tuple[Tensor, Tensor | None] | None:
        """The weight ``[N, K]`` and bias, if they are constants that can be packed."""
        weight, bias_N = _constant(self.weight), _constant(self.bias)
        if weight is None or weight.device.type != "cpu" or (bias_N is None and not self.bias.node().mustBeNone()):
            return None
        return (weight.t() if self.transposed else weight, bias_N) if onednn.available(weight.dtype) else None


def use_products(graph: Any, packed: bool) -> list[PackedWeight]:
    """Replace linear layers in the graph; the graph takes the packed weights returned here as its last argument."""
    groups: dict[Any, list[Layer]] = {}
    for layer in _layers(graph) if packed else ():
        if (found := layer.packable()) is not None:
            groups.setdefault((layer.x.debugName(), found[0].dtype), []).append(layer)
    argument = graph.addInput("packed")
    argument.setType(torch._C.ListType(torch._C.TensorType.get()))
    unpacking = graph.create("prim::ListUnpack", [argument], len(groups))
    graph.prependNode(unpacking)
    weights = []
    for group, value in zip(groups.values(), list(unpacking.outputs()), strict=True):
        value.setType(torch._C.TensorType.get())
        parts = [one for layer in group if (one := layer.packable()) is not None]
        weights.append(pack(*zip(*parts, strict=True)))
        _replace(graph, group, value, _insert_constant(graph, group[0].node, weights[-1].bias_N), weights[-1].sizes)
    for layer in _layers(graph):  # in bf16 torch calls oneDNN itself
        if layer.weight.type().dtype() == torch.float32 and layer.weight.type().device().type == "cpu" and onednn.available(torch.float32):
            weight = _insert(graph, layer.node, "aten::t", layer.weight) if layer.transposed else layer.weight
            _replace(graph, [layer], weight, layer.bias, ())
    return weights


def _layers(graph: Any) -> Iterator[Layer]:
    for node in graph.findAllNodes("aten::linear"):
        yield Layer(node)
    for node in graph.findAllNodes("aten::addmm"):  # transformers' Conv1D, of GPT-2
        if all(factor.toIValue() == 1 for factor in list(node.inputs())[3:]):
            yield Layer(node, (1, 2, 0), transposed=True)


def _replace(graph: Any, group: Sequence[Layer], weight: Any, bias: Any, sizes: Sequence[int]) -> None:
    """Put one product in place of the layers, whose outputs have these sizes."""
    first = group[0].node
    none, empty = (_insert_constant(graph, first, value) for value in ("none", ""))
    scalars = _insert(graph, first, "prim::ListConstruct", of=torch._C.ListType(torch._C.OptionalType(torch._C.NumberType.get())))
    out = _insert(graph, first, "mkldnn::_linear_pointwise", group[0].x, weight, bias, none, scalars, empty)
    at = 0
    for layer, size in zip(group, sizes or (0,), strict=True):
        part = out
        if len(group) > 1:
            part = _insert(graph, first, "aten::narrow", out, *(_insert_constant(graph, first, number) for number in (-1, at, size)))
            at += size
        layer.node.output().replaceAllUsesWith(part)
    for layer in group:
        layer.node.destroy()


def _insert(graph: Any, before: Any, kind: str, *inputs: Any, of: Any = None) -> Any:
    """Insert an operation before a node of the graph; returns its output, a tensor unless another type is given."""
    node = graph.create(kind, list(inputs), 1)
    node.insertBefore(before)
    node.output().setType(of or torch._C.TensorType.get())
    return node.output()


def _insert_constant(graph: Any, before: Any, value: Any) -> Any:
    with graph.insert_point_guard(before):
        return graph.insertConstant(value)


def _constant(value: Any) -> Tensor | None:
    """The tensor if a graph's value is a constant one."""
    if value.node().kind() != "prim::Constant" or value.node().mustBeNone():
        return None
    held = value.toIValue()
    return held if isinstance(held, Tensor) else None
