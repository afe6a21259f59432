"""The backbone that a recipe names, with its adapter; its configuration and dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig, PreTrainedModel

from headstart.heads.backbone.backbone import Backbone, load_backbone, load_config
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.quantization import loaded_dtype, quantizing
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


def read_config(section: sections.Backbone) -> PretrainedConfig:
    """Load the backbone's configuration; nothing else is downloaded. Raises UserError if there is none."""
    if find_gguf(section.path) is not None:
        quantizing(section.dtype, gguf=True)   # refuses integers
    return load_config(section.path, trust_remote_code=section.trust_remote_code)


def dtype_in_training(section: sections.Backbone, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that `open_backbone` loads the weights in (those that are not quantized)."""
    chosen = loaded_dtype(section.dtype, config, device)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return chosen if isinstance(chosen, torch.dtype) else stored
