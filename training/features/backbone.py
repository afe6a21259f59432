"""The backbone that a recipe names, with its adapter; its configuration and dtype."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context

import torch
from transformers import PretrainedConfig, PreTrainedModel

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.head_only import load_head_only
from headstart.heads.backbone.model_config import WITH_IMAGES, load_config, loaded_dtype, quantizing
from headstart.training.recipe import sections
from headstart.training.recipe.recipe import Cache, Recipe


def open_backbone(
    section: sections.Backbone,
    device: torch.device | None = None,
    place: Callable[[PreTrainedModel, torch.device], PreTrainedModel] | None = None,
    images: bool = False,
) -> Backbone:
    """Load the backbone, frozen, with ``backbone.adapter`` if set; see `load_backbone`. Raises UserError."""
    context = copy_context()
    context.run(WITH_IMAGES.set, images)
    backbone = context.run(
        load_backbone, section.path, dtype=section.dtype, trust_remote_code=section.trust_remote_code, attention=section.attention,
        device=device, place=place,
    )  # fmt: skip
    if section.adapter is not None:
        backbone.attach(section.adapter)
    return backbone


def opens_head_only(recipe: Recipe) -> bool:
    """Return True if a run needs no layers of the backbone: its features come from a cache or a server, and no drafter is made of them.

    An adapter lies on the layers, and a GGUF file is read whole.
    """
    section, drafters = recipe.backbone, [one.drafter for one in recipe.per_drafter().values()]
    pruned = any(one.get("kind") == "draft_model" and not (one.get("path") or one.get("architecture")) for one in drafters)
    cached = recipe.cache.dir is not None and section.adapter is None and find_gguf(section.path) is None
    return not pruned and (cached or recipe.features.endpoint is not None)


def open_for_training(
    recipe: Recipe, device: torch.device | None, place: Callable[[PreTrainedModel, torch.device], PreTrainedModel] | None = None
) -> Backbone:
    """Load what a recipe's run needs of the backbone; see `open_backbone`. Raises UserError."""
    section = recipe.backbone
    if not opens_head_only(recipe):
        return open_backbone(section, device, place, recipe.data.images)
    return load_head_only(section.path, dtype=section.dtype, trust_remote_code=section.trust_remote_code, device=device)


def open_to_cache(recipe: Recipe, device: torch.device | None) -> Backbone:
    """Load what writing a recipe's cache needs of the backbone: all of it, unless servers run it. Raises UserError."""
    return open_for_training(recipe.model_copy(update={"cache": Cache()}), device)


def read_config(section: sections.Backbone) -> PretrainedConfig:
    """Load the backbone's configuration; nothing else is downloaded. Raises UserError if there is none."""
    if find_gguf(section.path) is not None:
        quantizing(section.dtype, gguf=True)  # refuses integers
    return load_config(section.path, trust_remote_code=section.trust_remote_code)


def dtype_in_training(section: sections.Backbone, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that `open_backbone` loads the weights in (those that are not quantized)."""
    chosen = loaded_dtype(section.dtype, config, device)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return chosen if isinstance(chosen, torch.dtype) else stored
