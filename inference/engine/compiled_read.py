"""The backbone's verification passes through compiled layers, on a CPU."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PretrainedConfig

from headstart.heads.backbone.adapter import tuner_state
from headstart.heads.backbone.backbone import Backbone
from headstart.inference.capture.backend import Call
from headstart.inference.capture.capture import Capturer, warn_once
from headstart.support.errors import UserError

if TYPE_CHECKING:
    from headstart.inference.compiled.compiled_pass import CompiledPass, Missing
    from headstart.inference.compiled.sizes import Shape
    from headstart.inference.engine.reader import Reader

OFF = "HEADSTART_COMPILE"
"""With this environment variable at 0, compiled code is not used unless it is asked for by name."""
HINT = "decoding without compiled layers; `headstart compile {}` makes them, once, in minutes; small models in bf16 gain most"
ROPE = "its rotary frequencies depend on the context length"
logger = logging.getLogger(__name__)
UNSTATED = ("_name_or_path", "transformers_version")


def compiled_read(reader: Reader, function: Callable[..., Any]) -> CompiledPass | None:
    """`Reader._read` with every tap, compiled; None where the capturer's backend or the machine does not.

    With every tap, so that all heads, and none, have the same program: their passes have the same bits.
    """
    if not compiles(reader.capturer, reader.backbone):
        return None
    from headstart.inference.compiled.compiled_pass import CompiledPass, Where  # here, since few calls need it

    on, capturer = reader.backbone, reader.capturer
    where = Where(list(on.layers), [on.model], described(on.model), capturer.compiled, HINT.format(on.name or "MODEL"))
    return CompiledPass(function, _shapes, where, missing(capturer))


def missing(capturer: Capturer) -> Missing:
    """What is done about code that is not compiled: collected for `compile_model`, compiled at once for ``compile``, else nothing."""
    from headstart.inference.compiled import store

    return capturer.collect or ((lambda _, program: store.compile_missing(program)) if capturer.name == "compile" else None)


def compiles(capturer: Capturer, backbone: Backbone) -> bool:
    """True if compiled code is used. Raises UserError if that is asked for by name and cannot be."""
    name = capturer.name
    if name not in ("auto", "compile") or backbone.device.type != "cpu" or (name == "auto" and os.environ.get(OFF) == "0"):
        return False
    reason = not_compilable(backbone)
    if reason is not None and name == "compile":
        raise UserError(f"capture 'compile' cannot be used: {reason}; choose 'auto' or 'off'")
    if reason is not None:
        warn_once(f"the model's layers are not compiled, which makes small models up to twice as slow: {reason}")
    return reason is None


def not_compilable(backbone: Backbone) -> str | None:
    """The reason why the model's passes cannot be compiled here; None if they can."""
    from headstart.inference.compiled import kernels

    if backbone.device.type != "cpu":
        return f"compiled layers are for the CPU; the model is on {backbone.device.type}"
    if backbone.dtype not in kernels.DTYPES:
        return f"the model is in {backbone.dtype}".replace("torch.", "")
    if backbone.recurrent is not None:
        return f"{type(backbone.model).__name__} has recurrent layers"
    if backbone.rope_limit is not None:
        return ROPE
    return kernels.unavailable()


def _shapes(call: Call) -> list[Shape]:
    """The sizes of what `Reader._read` is called with."""
    stores, index = call.held[0], call.inputs[1]
    found: list[Shape] = []
    for place, leaf in enumerate(call.leaves[: call.held_leaves]):
        rows_there = (leaf.shape[0], "rows", *leaf.shape[2:])
        found.append((*rows_there[:3], "room", leaf.shape[-1]) if place < len(stores[0]) + len(stores[1]) else rows_there)
    stored = "nodes" if index is None else "stored"
    found += [("rows", "nodes"), ("rows", stored), ("rows", "nodes", stored)]
    if index is not None:
        found.append(("rows", "nodes"))
    return [*found, ("rows",), ("slots",)]


def described(model: nn.Module) -> str:
    """A hash of what a trace of the model's operations depends on: its classes, configuration and weights' shapes."""
    config = getattr(model, "config", None)
    stated = config.to_dict() if isinstance(config, PretrainedConfig) else {}
    settings = {key: value for key, value in stated.items() if key not in UNSTATED}
    sources = sorted({inspect.getsourcefile(type(module)) or "" for module in model.modules()})
    code = [(name, hashlib.sha256(Path(name).read_bytes()).hexdigest()) for name in sources if name]
    sizes = [(name, str(weight.dtype), tuple(weight.shape)) for name, weight in model.named_parameters()]
    kernel = getattr(config, "_attn_implementation", None)
    parts = (type(model).__qualname__, json.dumps(settings, sort_keys=True, default=str), code, sizes, tuner_state(model), kernel)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
