"""A drafter's levels compiled, on a CPU and for one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from headstart.heads.base import Drafter
from headstart.heads.kv.rows import STEP
from headstart.inference.capture.backend import Call, all_nearly_equal
from headstart.inference.capture.capture import Capturer
from headstart.inference.compiled.compiled_pass import CompiledPass, Where
from headstart.inference.compiled.sizes import Shape
from headstart.inference.engine.compiled_read import compiles, described
from headstart.support.pytree import list_tensors


def compiled_drafts(drafter: Drafter, capturer: Capturer, function: Callable[..., Any]) -> CompiledPass | None:
    """`draft_levels` compiled; None where nothing is compiled."""
    if drafter.uses_backbone_cache or not compiles(capturer, drafter.backbone):
        return None
    depends = (described(drafter), str(drafter.arguments), described(drafter.backbone.model))
    where = Where([], [drafter, drafter.backbone.model], depends)
    compiled = CompiledPass(function, _shapes, where, wait=capturer.name == "compile", agree=_first_level_agrees, lasting=False)
    capturer.compiled.append(compiled)
    return compiled


def _first_level_agrees(results: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """True if the scores of the first level do: further ones may be of other nodes, where two had nearly the same score."""
    return all_nearly_equal(others, results, slice(2, 3)) and all(bool(one.isfinite().all()) for one in others)


def _shapes(call: Call) -> list[Shape] | None:
    """The sizes of a call for one row: the slots of its caches, and of tables for their positions, change, and the number of features."""
    if call.inputs[-3].tokens_BW.shape[0] != 1:
        return None
    held = call.leaves[: call.held_leaves]
    slots = {leaf.shape[-2] for leaf in held if leaf.dim() >= 3 and leaf.shape[-2] % STEP == 0}
    if len(slots) > 1:
        return None
    found: list[Shape] = []
    for leaf in held:
        sizes: list[int | str] = list(leaf.shape)
        if leaf.dim() >= 3 and leaf.shape[-2] in slots:
            sizes[-2] = "room"
        elif leaf.dim() == 2 and leaf.shape[0] in slots:
            sizes[0] = "room"
        found.append(tuple(sizes))
    found += [tuple(leaf.shape) for leaf in call.leaves[call.held_leaves :]]
    for place, leaf in enumerate(list_tensors(call.inputs[0]), call.held_leaves):
        found[place] = (leaf.shape[0], "nodes", *leaf.shape[2:]) if leaf.dim() > 1 else tuple(leaf.shape)
    return found
