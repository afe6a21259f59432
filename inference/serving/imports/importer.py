"""Import heads that other trainers wrote: recognise the layout, read it strictly, measure acceptance, and save a Headstart checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import load_config
from headstart.heads.checkpoint import save_drafter
from headstart.inference.serving.export.export import PROVENANCE
from headstart.inference.serving.imports import (
    accelerator,
    block,
    draft_model,
    eagle,
    eagle3,
    hydra,
    medusa,
    mtp,
    own,
    speculators,
)
from headstart.inference.serving.imports.choose import Measured, measure, verdict
from headstart.inference.serving.imports.foreign import Foreign, read_foreign, read_json
from headstart.inference.serving.imports.prompts import prompts_for
from headstart.inference.serving.imports.reading import Counting, Reading, Source
from headstart.inference.serving.imports.strict import build, stored_dtype
from headstart.support.errors import UserError
from headstart.support.files import atomic

SOURCES: tuple[Source, ...] = (own, speculators, hydra, medusa, accelerator, block, eagle3, eagle, mtp, draft_model)
"""In the order in which they are asked whether a folder is theirs."""


@dataclass(frozen=True)
class Wishes:
    """How to read and measure."""

    counting: Counting | None = None
    depth: int | None = None
    prompts: str | None = None
    new_tokens: int = 48
    trust_remote_code: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for the prompts and kept with the heads."""


def import_heads(path: str, backbone_path: str, out: Path, load: Callable[[], Backbone], wishes: Wishes) -> dict[str, Any]:
    """Write the heads at ``path`` (folder or hub id) as a Headstart checkpoint to ``out`` and return a report.

    ``load`` loads the backbone at ``backbone_path`` once the heads are known to fit it. Raises UserError, and writes nothing, for layouts
    that are unknown or that Headstart's heads cannot compute, for another backbone, and for missing, unexpected or misshapen tensors.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists and is not an empty folder; give a new one")
    foreign = read_foreign(path)
    source = recognise(foreign)
    require_fit(foreign, source, backbone_path, wishes.trust_remote_code)
    backbone = load()
    depth = wishes.depth or _exported_depth(foreign)
    readings = [_deep(reading, depth) for reading in source.readings(foreign, backbone, wishes.counting)]
    drafters = [build(reading, backbone, path).to(device=backbone.device, dtype=backbone.dtype) for reading in readings]
    prompts, of_prompts = prompts_for(backbone, wishes.prompts, wishes.trust_remote_code, wishes.template_kwargs)
    measured = measure(list(zip(readings, drafters, strict=True)), prompts, wishes.new_tokens)
    best, lines = measured[0], verdict(measured)
    quantised = ["8-bit weights became the fp32 weights that they stand for"] if foreign.config.get("quantization_config") else []
    report = {
        "source": path,
        "layout": source.NAME,
        "kind": best.reading.kind,
        "arguments": best.drafter.arguments,
        "notes": [*best.reading.notes, *quantised],
        "measured_on": of_prompts,
        "readings": [{"choice": one.reading.choice, **one.figures} for one in measured],
        "files": foreign.hashes(),
    }
    chat: dict[str, Any] = {"template": None, "template_kwargs": dict(wishes.template_kwargs), "eos_token_id": []}
    _save(best, out, {"imported": report, "chat": chat})
    return {**report, "backbone": backbone.name, "out": str(out), "verdict": lines, "recipe": recipe_overrides(best, out)}


def recognise(foreign: Foreign) -> Source:
    """Return the module that reads this layout. Raises UserError if none does."""
    source = next((source for source in SOURCES if source.recognises(foreign)), None)
    if source is None:
        some = ", ".join(sorted(foreign.shapes)[:3])
        raise UserError(f"{foreign.path} has no known layout (tensors {some}, ...); known: {', '.join(source.NAME for source in SOURCES)}")
    return source


def require_fit(foreign: Foreign, source: Source, backbone: str, trust_remote_code: bool) -> None:
    """Raise UserError, naming both, if the heads are for a backbone of other sizes; only the backbone's configuration is read."""
    try:
        config = load_config(backbone, trust_remote_code=trust_remote_code).get_text_config()
    except UserError:
        return   # loading the backbone says why
    sizes = source.sizes(foreign)
    given = config.to_dict()
    keys = {"width": "hidden_size", "vocabulary": "vocab_size", "layers": "num_hidden_layers"}
    for (what, key), theirs in zip(keys.items(), (sizes.width, sizes.vocab, sizes.layers), strict=True):
        ours = given.get(key)
        if theirs is not None and ours is not None and theirs != ours:
            raise UserError(
                f"{foreign.path} ({source.NAME}) is for a backbone of {what} {theirs}; {backbone} has {what} {ours}: "
                f"give the backbone that they were trained on{_named(foreign)}"
            )


def _named(foreign: Foreign) -> str:
    """Name the backbone that a configuration states, if any."""
    verifier = ((foreign.config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    stated = foreign.config.get("base_model_name_or_path") or verifier
    return f", {stated}" if isinstance(stated, str) and stated else ""


def _exported_depth(foreign: Foreign) -> int | None:
    """Return the number of drafted tokens that `headstart export` states beside a layout, which does not."""
    file = foreign.folder / PROVENANCE
    stated = read_json(file).get("depth") if file.is_file() else None
    return stated if isinstance(stated, int) and stated > 0 else None


def _deep(reading: Reading, depth: int | None) -> Reading:
    """Return the reading drafting ``depth`` tokens, which the layouts do not say."""
    if depth is None:
        return reading
    key = "depth" if reading.arguments.get("parallel") else "draft_depth"
    return replace(reading, arguments={**reading.arguments, key: depth})


def recipe_overrides(best: Measured, out: Path) -> list[str]:
    """Return what a recipe needs to train these heads further: the arguments that are not the defaults."""
    defaults = {name: field.default for name, field in type(best.drafter.config).model_fields.items()}
    arguments = best.drafter.config.model_dump(mode="json", exclude_none=True)
    own = {key: value for key, value in arguments.items() if value != defaults[key] and key not in ("architecture", "native")}
    stated = {"kind": best.reading.kind, "init": str(out), **own}
    return [f"drafter.{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in stated.items()]


def _save(best: Measured, out: Path, extra: dict[str, Any]) -> None:
    drafter = best.drafter.to(dtype=stored_dtype(best.reading))
    with atomic(out, folder=True) as folder:
        save_drafter(drafter, folder, extra)
