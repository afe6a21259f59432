"""The backbone that a recipe names, with its adapter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.training.recipe import sections


def open_backbone(
    section: sections.Backbone,
    device: torch.device | None = None,
    place: Callable[[PreTrainedModel, torch.device], PreTrainedModel] | None = None,
) -> Backbone:
    """Load the backbone, frozen, with ``backbone.adapter`` if set; see `load_backbone`. Raises UserError."""
    backbone = load_backbone(
        section.path, dtype=section.dtype, trust_remote_code=section.trust_remote_code, attention=section.attention, device=device,
        place=place,
    )  # fmt: skip
    if section.adapter is not None:
        backbone.attach(section.adapter)
    return backbone
