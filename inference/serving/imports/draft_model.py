"""Draft models: ordinary causal models of transformers with the backbone's vocabulary, and PARD's, which name a mask token."""

from __future__ import annotations

from typing import Any

from headstart.heads.backbone import smaller
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.draft_model import DraftModel
from headstart.inference.serving.imports.foreign import Foreign
from headstart.inference.serving.imports.reading import Counting, Reading, Sizes

NAME = "draft model"
PARALLEL_DEPTH = 8
"""Tokens that a parallel model drafts where its files do not say; PARD's configurations do not."""


def recognises(foreign: Foreign) -> bool:
    architectures = foreign.config.get("architectures") or []
    return any(str(one).endswith(("ForCausalLM", "LMHeadModel")) for one in architectures) and len(foreign.shapes) > 0


def sizes(foreign: Foreign) -> Sizes:
    return Sizes()


def readings(foreign: Foreign, backbone: Backbone, counting: Counting | None) -> list[Reading]:
    small = load_backbone(str(foreign.folder), dtype="auto", device=backbone.device)
    smaller.require_fitting(backbone, small, smaller.find_tokenizers(backbone.name, str(foreign.folder)))
    notes = [] if small.vocab == backbone.vocab else [f"its vocabulary of {small.vocab} was brought to the backbone's {backbone.vocab}"]
    smaller.resize(small.model, backbone.vocab)
    arguments: dict[str, Any] = {"architecture": smaller.stated_config(small.model.config)}
    if (mask := foreign.config.get("pard_token")) is not None:
        arguments |= {"parallel": True, "mask_token": None if mask == backbone.vocab - 1 else mask, "depth": PARALLEL_DEPTH}
        notes.append(f"drafts in parallel; its files do not say how many tokens, {PARALLEL_DEPTH} here: --depth N for others")
    tensors = DraftModel(backbone, DraftModel.Config(**arguments), small.model).tensors()
    return [Reading("draft_model", arguments, tensors, notes=tuple(notes))]
