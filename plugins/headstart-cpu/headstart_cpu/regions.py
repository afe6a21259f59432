"""Splits the graph of a traced pass into its decoder layers and what lies between them.

The layers of a model are mostly the same operations with other weights. So a layer is written as a text that is equal for equal layers: a
function of its inputs and weights, with their dtypes and sizes. Such a `Region` is compiled once, whatever the number of layers.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from headstart.heads.backbone import tree_attention  # noqa: F401  (registers an operation)
from headstart.inference.capture.plugin import marking
from headstart_cpu import kernels  # noqa: F401  (as above)
from headstart_cpu.program import NotCompiled, Region, Size

aten = torch.ops.aten
REPLACED = {torch.ops.headstart.few_queries.default: torch.ops.headstart_cpu.attention.default}


class Call(NamedTuple):
    """The call of a region in place of its nodes."""

    region: Region
    inputs: tuple[fx.Node, ...]
    weights: tuple[str, ...]
    """Attributes of the traced graph."""
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    written: dict[fx.Node, fx.Node]
    """Nodes that are an input which the region has written into, and that input."""


@contextmanager
def marked(layers: Sequence[nn.Module], of: dict[fx.Node, int]) -> Iterator[None]:
    """Within this context every node that is traced inside one of these modules, or in a `region`, is noted with a number of that part."""
    parts, open_ = itertools.count(), list[Callable[[], None]]()

    def last() -> fx.Node | None:
        mode = get_proxy_mode()
        return None if mode is None else mode.tracer.graph._root.prev

    def enter() -> Callable[[], None]:
        start, part = last(), next(parts)

        def leave() -> None:
            node = last()
            while node is not None and node is not start:
                of.setdefault(node, part)
                node = node.prev

        return leave

    handles = [layer.register_forward_pre_hook(lambda *_: open_.append(enter())) for layer in layers]
    handles += [layer.register_forward_hook(lambda *_: open_.pop()()) for layer in layers]
    try:
        with marking(enter):
            yield
    finally:
        for handle in handles:
            handle.remove()


def split(graph: fx.GraphModule, of: dict[fx.Node, int], names: Mapping[str, str]) -> list[Call]:
    """The calls that take the place of the marked layers, in their order; ``names``: of sizes, by their symbols. Raises `NotCompiled`."""
    _ask_once(graph)
    numbers: dict[int, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        number = of.get(node)
        if number is None or not is_tensor(node) or node.op == "get_attr":  # sizes and weights are of no layer
            of.pop(node, None)
        elif node.target is aten.select.int and of.get(node.args[0]) != number:  # a layer's part of the KV cache
            del of[node]
        else:
            numbers.setdefault(number, []).append(node)
    return [_Writer(graph, nodes, names).call() for nodes in numbers.values()]


def is_tensor(node: fx.Node) -> bool:
    """True if the node's value is no size."""
    return not isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _ask_once(graph: fx.GraphModule) -> None:
    """Ask the function's arguments for the sizes that are one of theirs, once and at the top."""
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found: dict[str, tuple[fx.Node, int]] = {}
    for node in arguments:
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                found.setdefault(str(size.node.expr), (node, dim))
    asked: dict[str, fx.Node] = {}
    for node in list(graph.graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt) or (size := str(value.node.expr)) not in found:
            continue
        if size not in asked:
            with graph.graph.inserting_after(arguments[-1]):
                asked[size] = graph.graph.call_function(aten.sym_size.int, found[size])
            asked[size].meta["val"] = value
        node.replace_all_uses_with(asked[size])
        graph.graph.erase_node(node)


def writes(node: fx.Node) -> bool:
    """True if the operation writes into a tensor, its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _written(node: fx.Node) -> Any:
    """What a node is that was written into, or the node itself."""
    while writes(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


class _Writer:
    """Writes the nodes of one layer as a function."""

    def __init__(self, whole: fx.GraphModule, nodes: Sequence[fx.Node], names: Mapping[str, str]) -> None:
        self.whole, self.nodes, self.names = whole, nodes, names
        self.graph = fx.Graph()
        self.inputs: dict[fx.Node, fx.Node] = {}
        self.weights: dict[str, fx.Node] = {}
        self.own: dict[fx.Node, Any] = {}
        """What stands for each node of the whole graph."""

    def call(self) -> Call:
        """Write all of it."""
        inside = self.inside = {*self.nodes}
        for node in self.nodes:
            self.own[node] = self._copy(node)
        needed = [node for node in self.nodes if any(user not in inside for user in node.users)]
        written = {node: base for node in needed if (base := _written(node)) not in inside and base is not node}
        outputs = tuple(node for node in needed if node not in written)
        self.graph.output([self.own[node] for node in outputs])
        self.graph.eliminate_dead_code()
        self._placeholders_first(inputs := [*self.inputs.values(), *self.weights.values()])
        text = self.graph.python_code("self").src
        dtypes = [str(node.meta["val"].dtype).removeprefix("torch.") for node in inputs]
        region = Region(text, tuple(zip(dtypes, (tuple(map(self._size, node.meta["val"].shape)) for node in inputs), strict=True)))
        return Call(region, tuple(self.inputs), tuple(self.weights), outputs, tuple(self.nodes), written)

    def _size(self, size: Any) -> Size:
        if not isinstance(size, torch.SymInt):
            return int(size)
        if str(size) not in self.names:
            raise NotCompiled(f"a layer's input has a size that is computed from others: {size}")
        return self.names[str(size)]

    def _placeholders_first(self, inputs: Sequence[fx.Node]) -> None:
        """Name the inputs by their places, weights last, and put them at the top."""
        first = next(iter(self.graph.nodes))
        for number, node in reversed(list(enumerate(inputs))):
            node.name = node.target = f"in{number}"
            first.prepend(node)
            first = node

    def _copy(self, node: fx.Node) -> fx.Node:
        target: Any = node.target
        args: Any = fx.map_arg(node.args, self._value)
        if target is aten.add.Tensor and type(args[1]) is int and node.meta["val"].dtype == torch.int64 and node in self.inside:
            args = args[0], self._number(args[1])
        kwargs: Any = fx.map_arg(node.kwargs, self._value)
        copied = self.graph.create_node(node.op, REPLACED.get(target, target), args, kwargs, name="v")
        copied.meta["val"] = node.meta.get("val")
        return copied

    def _value(self, node: fx.Node) -> Any:
        """The layer's own node for one that it reads: an input, a weight, a size or one that was written before."""
        if node not in self.own:
            if node.op == "get_attr":
                self.own[node] = self._weight(str(node.target))
            elif is_tensor(node):
                self.own[node] = self.inputs[node] = self._placeholder(node.meta["val"])
            else:
                self.own[node] = self._copy(node)
        return self.own[node]

    def _number(self, value: int) -> fx.Node:
        """A number that is added to positions, as an input: levels of drafts differ in it alone."""
        top = [node for node in self.whole.graph.nodes if node.op == "placeholder"][-1]
        with self.whole.graph.inserting_after(top):
            node = self.whole.graph.call_function(aten.scalar_tensor.default, (value,), {"dtype": torch.int64})
        node.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")
        self.own[node] = self.inputs[node] = self._placeholder(node.meta["val"])
        return self.own[node]

    def _weight(self, name: str) -> fx.Node:
        if name not in self.weights:
            self.weights[name] = self._placeholder(getattr(self.whole, name))
        return self.weights[name]

    def _placeholder(self, like: Tensor) -> fx.Node:
        node = self.graph.placeholder("in")
        node.meta["val"] = like
        return node
