"""Puts our products, with packed weights, in place of linear layers of a traced graph; those that read the same input become one product.

Shape suffixes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from headstart_cpu.kernels import DTYPES
from headstart_cpu.program import Packed, whole_blocks

aten = torch.ops.aten
Node = Any  # of fx, whose arguments have no types


class _Linear(NamedTuple):
    """A linear layer of the graph."""

    node: Node
    x: Node
    weight: str
    bias: str | None
    outputs: int
    transposed: bool


def use_products(graph: fx.GraphModule, layer_of: MutableMapping[Node, int]) -> dict[str, Packed]:
    """Replace linear layers in the graph; returns what the attributes are that it reads instead. New nodes are of the same layer."""
    groups: dict[Any, list[_Linear]] = {}
    for node in graph.graph.nodes:
        if (linear := _linear(graph, node)) is not None:
            x = linear.x
            same = (x.args[0], str(x.meta["val"].shape)) if x.target is aten.view.default else x
            groups.setdefault((same, linear.transposed, layer_of.get(node)), []).append(linear)
    made: dict[str, Packed] = {}
    for group in groups.values():
        before = {*graph.graph.nodes}
        with graph.graph.inserting_before(group[0].node):
            _replace(graph, group, made)
        if (layer := layer_of.get(group[0].node)) is not None:
            layer_of.update({node: layer for node in graph.graph.nodes if node not in before})
        for one in group:
            for node in (one.node, *one.node.all_input_nodes, *(far for near in one.node.all_input_nodes for far in near.all_input_nodes)):
                if not node.users and node.op != "placeholder":
                    layer_of.pop(node, None)
                    graph.graph.erase_node(node)
    return made


def _linear(graph: fx.GraphModule, node: Node) -> _Linear | None:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs:
        return None
    bias, x, weight = (None, *node.args) if node.target is aten.mm.default else node.args
    transposed = weight.op == "get_attr"
    if not transposed:
        if weight.target is not aten.t.default:
            return None
        weight = weight.args[0]
    if weight.op != "get_attr" or (bias is not None and bias.op != "get_attr"):
        return None
    tensor = getattr(graph, weight.target)
    inputs, outputs = tensor.shape if transposed else reversed(tensor.shape)
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in DTYPES and inputs % 2 == 0
    if not plain or (bias is not None and getattr(graph, bias.target).shape != (outputs,)):
        return None
    return _Linear(node, x, weight.target, None if bias is None else bias.target, outputs, transposed)


def _replace(graph: fx.GraphModule, group: list[_Linear], made: dict[str, Packed]) -> None:
    """Write one product in place of linear layers that read the same input."""
    first, outputs = group[0], tuple(one.outputs for one in group)
    tensor = getattr(graph, first.weight)
    whole, inputs = sum(map(whole_blocks, outputs)), tensor.shape[0 if first.transposed else 1]

    def attribute(what: Packed, size: int, dtype: torch.dtype) -> Node:
        name = next((name for name, other in made.items() if other == what), f"_packed{len(made)}")
        made[name] = what
        node = graph.graph.create_node("get_attr", name)
        node.meta["val"] = torch.empty(size, dtype=dtype, device="meta")
        return node

    weight = attribute(Packed(tuple(one.weight for one in group), outputs, first.transposed), whole * inputs, tensor.dtype)
    biases = tuple(one.bias for one in group)
    bias = attribute(Packed(biases, outputs, bias=True), whole, torch.float32) if any(biases) else None
    count = first.outputs if len(group) == 1 else whole
    product = graph.graph.call_function(torch.ops.headstart_cpu.product.default, (first.x, weight, bias, count))
    product.meta["val"] = first.node.meta["val"].new_empty(*first.node.meta["val"].shape[:-1], count)
    at = 0
    for one in group:
        part = product
        if len(group) > 1:
            part = graph.graph.call_function(aten.slice.Tensor, (product, -1, at, at + one.outputs))
            part.meta["val"] = one.node.meta["val"]
        one.node.replace_all_uses_with(part)
        at += whole_blocks(one.outputs)
