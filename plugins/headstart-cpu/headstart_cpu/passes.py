"""Which functions of decoding are compiled: the backbone's verification passes and drafts."""

import inspect
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor, nn
from transformers import PretrainedConfig

from headstart.heads.backbone.adapter import tuner_state
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.heads.layers.rows import STEP
from headstart.inference.capture.captured import warn_once
from headstart.inference.capture.plugin import Call, Collect, Function, all_nearly_equal
from headstart.inference.engine.tree import CPU_WIDTH
from headstart.support.errors import UserError
from headstart.support.files import file_hash, value_hash
from headstart.support.pytree import list_tensors
from headstart_cpu import kernels, store
from headstart_cpu.compiled_pass import CompiledPass
from headstart_cpu.program import Shape

OFF = "HEADSTART_COMPILE"
"""With this environment variable at 0, compiled code is not used unless it is asked for by name."""
HINT = "decoding without compiled layers or drafts; `headstart compile {}` makes them, once (drafts by --heads DIR); small models gain most"
UNSTATED = ("_name_or_path", "architectures", "dtype", "transformers_version")


def compiled_pass(function: Function, of: Backbone | nn.Module | None, capture: str, collect: Collect | None) -> CompiledPass | None:
    """The function, compiled; None where that is not wanted or not possible. Raises UserError if it is asked for by name and not possible.

    ``of``: the backbone whose trees it verifies, or the drafter that drafts.
    """
    assert isinstance(of, (Backbone, Drafter))
    on = of if isinstance(of, Backbone) else of.backbone
    if capture == "auto" and os.environ.get(OFF) == "0":
        return None
    if (reason := not_compilable(on)) is not None:
        if capture == "compile":
            raise UserError(f"capture 'compile' cannot be used: {reason}; choose 'auto' or 'off'")
        warn_once(f"the model's layers are not compiled, which makes small models up to twice as slow: {reason}")
        return None
    hint = partial(_hint, on.name or "MODEL", on is of)
    missing = collect or ((lambda _, program: store.compile_missing(program)) if capture == "compile" else None)
    if isinstance(of, Backbone):
        return CompiledPass(function, _read_shapes, list(on.layers), [on.model], described(on.model), hint, missing)
    depends = described(of), str(of.arguments), described(on.model)
    return CompiledPass(function, _draft_shapes, [], [of, on.model], depends, hint, missing, _first_level_agrees)


def _hint(model: str, reads: bool, call: Call) -> str:
    """How what the call needs is compiled; empty for drafts of trees of a fixed size, which only ``compile`` compiles."""
    rows = len(call.leaves[call.held_leaves] if reads else call.inputs[-3].tokens_BW)
    adaptive = reads or call.inputs[-2] == (CPU_WIDTH if rows == 1 else 1)
    return HINT.format(model + (" --batch-size N" if rows > 1 else "")) if adaptive else ""


def not_compilable(backbone: Backbone) -> str | None:
    """The reason why the model's passes cannot be compiled here; None if they can."""
    if backbone.device.type != "cpu":
        return f"compiled layers are for the CPU; the model is on {backbone.device.type}"
    if backbone.dtype not in kernels.DTYPES:
        return f"the model is in {backbone.dtype}".replace("torch.", "")
    if backbone.no_trees is not None:
        return "its drafts are chains, which are read with transformers' own cache"
    if backbone.recurrent is not None:
        return f"{type(backbone.model).__name__} has recurrent layers"
    if backbone.rope_limit is not None:
        return "its rotary frequencies depend on the context length"
    return kernels.unavailable()


def _read_shapes(call: Call) -> list[Shape]:
    """The sizes of what `Reader._read` is called with."""
    index = call.inputs[1]
    stored = "nodes" if index is None else "stored"
    found: list[Shape] = [(len(leaf), "rows", leaf.shape[2], "room", leaf.shape[-1]) for leaf in call.leaves[: call.held_leaves]]
    found += [("rows", "nodes"), ("rows", stored), ("rows", "nodes", stored)]
    if index is not None:
        found.append(("rows", "nodes"))
    return [*found, *[("rows",)] * (len(call.inputs[2]) - 1), ("slots",)]


def _first_level_agrees(results: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """True if the scores of the first level do: further ones may be of other nodes, where two had nearly the same score."""
    return all_nearly_equal(others, results, slice(2, 3)) and all(bool(tensor.isfinite().all()) for tensor in others)


def _draft_shapes(call: Call) -> list[Shape] | None:
    """The sizes of a call: rows (but one row is apart), the slots of caches and of tables for their positions, and features change."""
    rows, held = call.inputs[-3].tokens_BW.shape[0], call.leaves[: call.held_leaves]
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
    if rows == 1:
        return found
    return [("rows", *shape[1:]) if shape and shape[0] == rows else shape for shape in found]


def described(model: nn.Module) -> str:
    """A hash of what a trace of the model's operations depends on: its classes, configuration and weights' shapes."""
    config = getattr(model, "config", None)
    stated = config.to_dict() if isinstance(config, PretrainedConfig) else {}
    settings = {key: value for key, value in stated.items() if key not in UNSTATED}
    sources = sorted({inspect.getsourcefile(type(module)) or "" for module in model.modules()})
    code = [(name, file_hash(Path(name))) for name in sources if name]
    sizes = [(name, str(weight.dtype), tuple(weight.shape)) for name, weight in model.named_parameters()]
    kernel = getattr(config, "_attn_implementation", None)
    return value_hash((type(model).__qualname__, settings, code, sizes, tuner_state(model), kernel))
