"""Backend ``trace``: TorchScript on a CPU, with packed weights. For passes that are not compiled: where there is no C++ compiler, or
nothing was compiled, and of kinds that are not compiled (`not_compilable`).

A small model spends most of a forward pass in Python, launching some hundred operations; replaying them from a trace takes half the time.
A trace works for new sizes without retracing. `torch.jit.trace` is not used: it keeps the graph of every trace, some MB of a model's
forward pass, until the process ends.

In a trace oneDNN's products take the place of linear layers, with packed weights if there is memory. Tracing takes no opaque tensor as a
constant and no optional list as an argument, so layers are traced as they are and replaced afterwards; the packed weights become one more
argument of the graph. Layers that read the same value (queries, keys and values; gate and up) become one product with packed weights.

A decoding step multiplies every weight with one row, or with as many rows as a tree has nodes. `F.linear` reads the weight as it lies in
memory, and its cost jumps with the first few rows; in the kernel's order 12 rows cost little more than one. A packed copy takes as much
memory as the weight, which stays for the model's other callers; captured passes do not read it, so that the system can take its memory back
if it is mapped from a file.

Shape suffixes: N outputs, K inputs.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import psutil
import torch
from torch import Tensor, nn

from headstart.heads.backbone.tree_attention import LONG
from headstart.inference.capture import onednn
from headstart.inference.capture.capture import version
from headstart.inference.capture.plugin import Backend, Call, Capture, Flat, Function, sizes_of_one

PACKED_FOR = 12
"""Rows that the order is chosen for; it works for any number."""
MEMORY_SHARE = 0.25
"""Weights are packed if they take at most this share of the machine's memory."""


@dataclass(eq=False)
class PackedWeight:
    """One packed weight, of one linear layer or of several that read the same input."""

    packed: Tensor
    """Opaque: only oneDNN's kernels can read it."""
    bias_N: Tensor | None
    sizes: tuple[int, ...]
    """The outputs of each layer."""
    originals: tuple[Tensor, ...]
    """The layers' own weights and biases, kept so that their addresses, by which packed weights are found, are not used again."""


_SHARED: WeakValueDictionary[Any, PackedWeight] = WeakValueDictionary()
"""Packed weights in use, by what they were made from: all captures of a model share them."""


def pack(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> PackedWeight:
    """Pack the weights ``[N, K]`` of layers that read the same input; their outputs are concatenated."""
    originals = (*weights, *(bias for bias in biases if bias is not None))
    layouts = ((tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), version(tensor)) for tensor in originals)
    key = (*layouts, *(bias is None for bias in biases))
    found = _SHARED.get(key)
    if found is None:
        weight_NK = torch.cat([weight.detach() for weight in weights]) if len(weights) > 1 else weights[0].detach()
        parts = [weight.new_zeros(len(weight)) if bias is None else bias.detach() for weight, bias in zip(weights, biases, strict=True)]
        bias_N = None if all(bias is None for bias in biases) else torch.cat(parts)
        found = PackedWeight(onednn.pack(weight_NK.contiguous(), PACKED_FOR), bias_N, tuple(map(len, weights)), originals)
        _SHARED[key] = found
    return found


def fits_in_memory(module: nn.Module | None) -> bool:
    """True if the packed weights of the module's linear layers take at most `MEMORY_SHARE` of the machine's memory."""
    layers = [] if module is None else [part for part in module.modules() if isinstance(part, nn.Linear)]
    return sum(layer.weight.nbytes for layer in layers) <= MEMORY_SHARE * psutil.virtual_memory().total


_C = cast(Any, torch._C)
PASSES = ("_jit_pass_dce", "_jit_pass_cse")
TYPES = ("ListType", "NumberType", "OptionalType", "TensorType")
KEYS = ("DispatchKey", "DispatchKeySet", "_ExcludeDispatchKeyGuard")
PRIVATE = (*PASSES, "_create_graph_by_tracing", "_create_function_from_graph", *TYPES, *KEYS)
"""Names of `torch._C` with which graphs are made, changed and run, and they may change between releases."""


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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # of branches on sizes: see `Capture.compare`
        graph, _ = _C._create_graph_by_tracing(function, tuple(inputs), lambda value: "", True, False, None, [])
    return graph


def _untracked() -> Any:
    """A context without autograd's bookkeeping of views and in-place writes, which `torch.no_grad` keeps: a tenth of a small model's step.

    So has `torch.inference_mode`, but its tensors cannot be changed in place outside, as logits processors do.
    """
    return _C._ExcludeDispatchKeyGuard(_tracking())


@cache
def _tracking() -> Any:
    key, keys = _C.DispatchKey, _C.DispatchKeySet
    return keys(key.ADInplaceOrView) | keys(key.AutogradFunctionality) | keys(key.AutogradOther)


class ProductFunction:
    """A traced function with oneDNN's products; ``packed``: with packed weights."""

    def __init__(self, traced: Any, packed: bool) -> None:
        graph = traced.copy()
        self.weights = use_products(graph, packed)
        _C._jit_pass_dce(graph)
        _C._jit_pass_cse(graph)
        self.traced = _C._create_function_from_graph("pass", graph)
        self._packed = [weight.packed for weight in self.weights]

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
    groups: dict[Any, list[tuple[Layer, Tensor, Tensor | None]]] = {}
    for layer in _layers(graph) if packed else ():
        if (found := layer.packable()) is not None:
            groups.setdefault((layer.x.debugName(), found[0].dtype), []).append((layer, *found))
    argument = graph.addInput("packed")
    argument.setType(_C.ListType(_C.TensorType.get()))
    unpacking = graph.create("prim::ListUnpack", [argument], len(groups))
    graph.prependNode(unpacking)
    weights = []
    for group, value in zip(groups.values(), list(unpacking.outputs()), strict=True):
        value.setType(_C.TensorType.get())
        layers, originals, biases = zip(*group, strict=True)
        weights.append(pack(originals, biases))
        _replace(graph, layers, value, _insert_constant(graph, layers[0].node, weights[-1].bias_N), weights[-1].sizes)
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
    scalars = _insert(graph, first, "prim::ListConstruct", of=_C.ListType(_C.OptionalType(_C.NumberType.get())))
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
    node.output().setType(of or _C.TensorType.get())
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
