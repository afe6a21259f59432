"""Traces a pass into a program."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from headstart.heads.backbone.tree_attention import attention_as_one_operation
from headstart_cpu.fakes import Fakes
from headstart_cpu.products import use_products
from headstart_cpu.program import SPACE, NotCompiled, Program, named_tensors
from headstart_cpu.regions import Call, is_tensor, marked, split
from headstart_cpu.sizes import Inputs


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
    packed = {name: one for name, one in packed.items() if name in used}
    used = (used - {*packed}) | {name for one in packed.values() for name in one.names if name is not None}
    names = {id(tensor): f"{i}.{name}" for i, module in enumerate(modules) for name, tensor in named_tensors(module)}
    attributes = {name: names.get(id(getattr(graph, name)), "") for name in sorted(used)}
    if missing := next((name for name, there in attributes.items() if not there), None):
        raise NotCompiled(f"it makes a tensor of shape {list(getattr(graph, missing).shape)} from numbers")
    shapes = tuple((dtype, shape) for (dtype, _), shape in zip(inputs, fakes.sizes(), strict=True))
    called = tuple((regions.index(call.region), call.weights) for call in calls)
    return Program(text, shapes, tuple(fakes.conditions()), attributes, packed, tuple(regions), called)


def _between(graph: fx.GraphModule, calls: Sequence[Call]) -> tuple[str, set[str]]:
    """The text of the whole graph with layers as calls, and the attributes that it reads itself."""
    rest, of = fx.Graph(), dict[fx.Node, Any]()
    inside = {node for call in calls for node in call.nodes}
    last = {call.nodes[-1]: number for number, call in enumerate(calls)}

    def copied(node: fx.Node) -> Any:
        if node not in of:
            of[node] = rest.node_copy(node, copied)
        return of[node]

    for node in graph.graph.nodes:
        if node in last:
            call = calls[last[node]]
            found = rest.call_module(f"call_{last[node]}", ([copied(one) for one in call.inputs],))
            of.update({one: rest.call_function(operator.getitem, (found, place)) for place, one in enumerate(call.outputs)})
            of.update({one: copied(base) for one, base in call.written.items()})
        elif node not in inside and is_tensor(node):  # sizes are asked for where they are needed
            copied(node)
    kept = lambda node: node.op in ("placeholder", "output", "call_module") or _writes(node)  # noqa: E731
    rest.eliminate_dead_code(is_impure_node=kept)
    code = rest.python_code("self")
    if unknown := sorted({*code.globals} - {*SPACE, "fx_pytree", "pytree"}):
        raise NotCompiled(f"its text uses {unknown[0]}")
    return code.src, {str(node.target) for node in rest.nodes if node.op == "get_attr"}


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
