"""Traces a pass into a program, in which our products, with packed weights, take the place of linear layers; those that read the same input
become one product.

Shape suffixes: N outputs, K inputs.
"""

import operator
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from headstart.heads.backbone.tree_attention import attention_as_one_operation
from headstart_cpu.kernels import DTYPES
from headstart_cpu.program import SPACE, Inputs, NotCompiled, Packed, Program, Shape, Size, named_tensors, whole_blocks
from headstart_cpu.regions import Call, is_tensor, marked, split, writes

aten = torch.ops.aten
Node = Any  # of fx, whose arguments have no types


def traced(
    function: Callable[..., tuple[Tensor, ...]], inputs: Inputs, layers: Sequence[nn.Module], modules: Sequence[nn.Module]
) -> Program:
    """Trace a function of tensors of these dtypes and shapes, which runs these layers and reads weights of these modules.

    Raises `NotCompiled`, or what the function or torch raises where it cannot be traced.
    """
    fakes, of = Fakes(inputs), dict[fx.Node, int]()
    quiet = warnings.catch_warnings(action="ignore", category=FutureWarning)  # torch's, of its own code
    with fakes.mode, attention_as_one_operation(), marked(layers, of), quiet:
        graph = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fakes.tensors)
    packed = use_products(graph, of)
    calls = split(graph, of, fakes.names())
    if not calls:
        raise NotCompiled("it runs no decoder layer")
    regions = list(dict.fromkeys(call.region for call in calls))
    text, used = _between(graph, calls)
    used |= {name for call in calls for name in call.weights}
    packed = {name: weight for name, weight in packed.items() if name in used}
    used = (used - {*packed}) | {name for weight in packed.values() for name in weight.names if name is not None}
    names = {id(tensor): f"{i}.{name}" for i, module in enumerate(modules) for name, tensor in named_tensors(module)}
    attributes = {name: names.get(id(getattr(graph, name)), "") for name in sorted(used)}
    if missing := next((name for name, there in attributes.items() if not there), None):
        raise NotCompiled(f"it makes a tensor of shape {list(getattr(graph, missing).shape)} from numbers")
    shapes = tuple((dtype, shape) for (dtype, _), shape in zip(inputs, fakes.sizes(), strict=True))
    called = tuple((regions.index(call.region), call.weights) for call in calls)
    return Program(text, shapes, tuple(fakes.conditions()), attributes, packed, tuple(regions), called)


def _between(graph: fx.GraphModule, calls: Sequence[Call]) -> tuple[str, set[str]]:
    """The text of the whole graph with layers as calls, and the attributes that it reads itself."""
    rest, of = fx.Graph(), dict[Any, Any]()
    inside = {node for call in calls for node in call.nodes}
    last = {call.nodes[-1]: number for number, call in enumerate(calls)}

    def copied(node: Node) -> Any:
        if node not in of and _is_layers_part(node):  # they are taken apart by one operation: each takes some microseconds
            whole, dim, place = node.args
            parts = of[whole, dim] = of.get((whole, dim)) or rest.call_function(aten.unbind.int, (copied(whole), dim))
            of[node] = rest.call_function(operator.getitem, (parts, place))
        if node not in of:
            of[node] = rest.node_copy(node, copied)
        return of[node]

    for node in graph.graph.nodes:
        if node in last:
            call = calls[last[node]]
            found = rest.call_module(f"call_{last[node]}", ([copied(node) for node in call.inputs],))
            of.update({output: rest.call_function(operator.getitem, (found, place)) for place, output in enumerate(call.outputs)})
            of.update({written: copied(base) for written, base in call.written.items()})
        elif node not in inside and is_tensor(node):  # sizes are asked for where they are needed
            copied(node)
    kept = lambda node: node.op in ("placeholder", "output", "call_module") or writes(node)  # noqa: E731
    rest.eliminate_dead_code(is_impure_node=kept)
    code = rest.python_code("self")
    if unknown := sorted({*code.globals} - {*SPACE, "fx_pytree", "pytree"}):
        raise NotCompiled(f"its text uses {unknown[0]}")
    return code.src, {str(node.target) for node in rest.nodes if node.op == "get_attr"}


def _is_layers_part(node: Node) -> bool:
    """True for one layer's keys or values of the stores that hold all layers'."""
    chosen = node.target is aten.select.int and node.args[0].op == "placeholder"
    return bool(chosen) and type(node.args[0].meta["val"].shape[node.args[1]]) is int


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
    graph.graph.eliminate_dead_code()
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
    first, outputs = group[0], tuple(item.outputs for item in group)
    tensor = getattr(graph, first.weight)
    whole, inputs = sum(map(whole_blocks, outputs)), tensor.shape[0 if first.transposed else 1]

    def attribute(what: Packed, size: int, dtype: torch.dtype) -> Node:
        name = next((name for name, other in made.items() if other == what), f"_packed{len(made)}")
        made[name] = what
        graph.register_buffer(name, torch.empty(size, dtype=dtype, device="meta"))
        return graph.graph.get_attr(name)

    weight = attribute(Packed(tuple(item.weight for item in group), outputs, first.transposed), whole * inputs, tensor.dtype)
    biases = tuple(item.bias for item in group)
    bias = attribute(Packed(biases, outputs, bias=True), whole, torch.float32) if any(biases) else None
    count = first.outputs if len(group) == 1 else whole
    product = graph.graph.call_function(torch.ops.headstart_cpu.product.default, (first.x, weight, bias, count))
    product.meta["val"] = first.node.meta["val"].new_empty(*first.node.meta["val"].shape[:-1], count)
    at = 0
    for item in group:
        part = product
        if len(group) > 1:
            part = graph.graph.call_function(aten.slice.Tensor, (product, -1, at, at + item.outputs))
            part.meta["val"] = item.node.meta["val"]
        item.node.replace_all_uses_with(part)
        at += whole_blocks(item.outputs)


# Tensors without data to trace with, whose sizes that change are symbols.

EXAMPLES = {"rows": 3, "nodes": 7, "stored": 11, "slots": 139, "room": 193}
"""Sizes to trace with: one number for each name, from 2 on, so that equal numbers are the same size."""


class Fakes:
    """Tensors without data, of these dtypes and shapes; equal names are one symbol."""

    def __init__(self, inputs: Inputs) -> None:
        self.env = ShapeEnv(duck_shape=True)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        names = dict.fromkeys(size for _, shape in inputs for size in shape if isinstance(size, str))
        self.examples = {name: EXAMPLES[name] for name in names}
        self.tensors = [self._fake(i, dtype, shape) for i, (dtype, shape) in enumerate(inputs)]

    def _fake(self, number: int, dtype: str, shape: Shape) -> FakeTensor:
        like = torch.empty([size if isinstance(size, int) else self.examples[size] for size in shape], dtype=getattr(torch, dtype))
        kinds = [DimDynamic.STATIC if isinstance(size, int) else DimDynamic.DUCK for size in shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        return self.mode.from_tensor(like, source=LocalSource(f"t{number}"), symbolic_context=context)

    def names(self) -> dict[str, str]:
        """The name of every symbol."""
        of: dict[str, str] = {}
        for tensor in self.tensors:
            for size in tensor.shape:
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    hint = size.node.hint
                    of[str(size.node.expr)] = next(name for name, example in self.examples.items() if example == hint)
        return of

    def sizes(self) -> list[Shape]:
        """The shapes as they are after tracing: two sizes that had to be equal have one name, one that had to be a number is that."""
        names = self.names()

        def named(size: Any) -> Size:
            return names[str(size.node.expr)] if isinstance(size, torch.SymInt) and size.node.expr.is_symbol else int(size)

        return [tuple(map(named, tensor.shape)) for tensor in self.tensors]

    def conditions(self) -> list[str]:
        """What has to hold of the sizes, as expressions of their names."""
        names, found = self.names(), []
        for guard in self.env.guards:
            condition = self.env.simplify(guard.expr)
            symbols = {symbol: names.get(str(symbol)) for symbol in condition.free_symbols}
            if symbols and all(symbols.values()):
                found.append(str(condition.subs({symbol: sympy.Symbol(str(name), positive=True) for symbol, name in symbols.items()})))
        return list(dict.fromkeys(found))
