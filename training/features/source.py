"""The backbone that a recipe names, and sources of a batch's features: the live backbone, or a cache or servers behind the same interface.

For on-policy training (``objective.on_policy``) the backbone scores the drafter's rollouts at every step, so it must be live, keep its KV
cache of the batch, and follow masks. The drafter's tokens must depend on those drafted before them. The loss is
`objective.on_policy_loss`.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from headstart.chat.images import ImageFile
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.backbone.features import Features, Images, join_features, stack_rows, with_positions
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.head_only import load_head_only
from headstart.heads.backbone.model_config import WITH_IMAGES, load_config, loaded_dtype, quantizing
from headstart.heads.base import Drafter
from headstart.heads.layers.causal_attention import document_masks, document_positions
from headstart.support.devices import holding
from headstart.support.errors import UserError
from headstart.training.data.batches import Batch, collate
from headstart.training.data.samples import Sample
from headstart.training.recipe import sections
from headstart.training.recipe.recipe import Recipe


def open_backbone(
    section: sections.Backbone,
    device: torch.device | None = None,
    place: Callable[[PreTrainedModel, torch.device], PreTrainedModel] | None = None,
    images: bool = False,
) -> Backbone:
    """Load the backbone, frozen, with ``backbone.adapter`` if set; see `load_backbone`. Raises UserError."""
    own: dict[str, Any] = {"dtype": section.dtype, "trust_remote_code": section.trust_remote_code, "attention": section.attention}
    with holding(WITH_IMAGES, images):
        backbone = load_backbone(section.path, device=device, place=place, **own)
    if section.adapter is not None:
        backbone.attach(section.adapter)
    return backbone


def opens_head_only(recipe: Recipe) -> bool:
    """Return True if a run needs no layers of the backbone: its features come from a cache or a server, and no drafter is made of them.

    An adapter lies on the layers, and a GGUF file is read whole.
    """
    section, drafters = recipe.backbone, [single.drafter for single in recipe.per_drafter().values()]
    pruned = any(drafter.get("kind") == "draft_model" and not (drafter.get("path") or drafter.get("architecture")) for drafter in drafters)
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


class FeatureSource(ABC):
    """Returns the features of batches."""

    backbone: Backbone
    lacks_last = False
    """The features of a sample's last token, which no loss reads, are not its own."""
    ahead = 0
    """Optimiser steps whose batches `prefetch` wants."""

    @abstractmethod
    def read(self, batch: Batch) -> Features:
        """Return features on the batch's device, with its loss mask and documents."""

    @abstractmethod
    def probe(self, tokens_1T: Tensor) -> Features:
        """Return the features of a few tokens, with all taps that can be had, for the start values of heads."""

    def for_starts(self, taps: tuple[int, ...]) -> FeatureSource:
        """Return the source that start values are fitted to, with these taps and final hidden states."""
        return self

    def read_held_out(self, samples: Sequence[Sample]) -> Iterator[Features]:
        """Yield the features of each of the held-out rows that are evaluated without decoding; none if they cannot be had."""
        for i in range(len(samples)):
            yield self.read(collate(samples, [[i]]).to(self.backbone.device))

    def prefetch(self, batches: Iterable[Batch]) -> None:  # noqa: B027  (most sources have nothing to do)
        """Begin to read the batches of a later step."""

    def close(self) -> None:  # noqa: B027
        """Let go of what the source holds open."""


class LiveFeatures(FeatureSource):
    """Runs the backbone in its own dtype, as in decoding."""

    def __init__(self, backbone: Backbone, taps: tuple[int, ...]) -> None:
        self.backbone, self.taps = backbone, taps

    def for_starts(self, taps: tuple[int, ...]) -> FeatureSource:
        return LiveFeatures(self.backbone, taps)

    def probe(self, tokens_1T: Tensor) -> Features:
        with suppress(UserError):  # states that are not one for each token, as XLNet's
            return self.backbone.read(tokens_1T, taps=tuple(range(self.backbone.num_layers + 1)))
        return self.backbone.read(tokens_1T)

    def read(self, batch: Batch) -> Features:
        return self.read_into(None, batch)

    def read_into(self, cache: DynamicCache | None, batch: Batch) -> Features:
        """Return the features; the KV cache, if any, gets the backbone's keys and values of all positions."""
        if any(files for row in batch.images for files in row):
            assert cache is None
            features = stack_rows([self._apart(*row) for row in zip(batch.tokens_BT, batch.document_BT, batch.images, strict=True)])
            return replace(features, tokens_BT=batch.tokens_BT, loss_mask_BT=batch.loss_mask_BT, document_BT=batch.document_BT)
        positions_BT, attention_mask = None, None  # causal, so no position attends to right padding
        if batch.packed:
            positions_BT = document_positions(batch.document_BT)
            attention_mask = document_masks(batch.document_BT, self.backbone.windows)
        features = self.backbone.read(batch.tokens_BT, cache, positions_BT, attention_mask, taps=self.taps)
        return replace(features, loss_mask_BT=batch.loss_mask_BT, document_BT=batch.document_BT)

    def _apart(self, tokens_T: Tensor, document_T: Tensor, images: Sequence[Sequence[ImageFile]]) -> Features:
        """Return the features of a row's samples, each read by itself, with its images, in the model's own forward pass."""
        samples = [(tokens_T[document_T == number], files) for number, files in enumerate(images)]
        return join_features([self.backbone.read(own[None], taps=self.taps, images=self.images(own, files)) for own, files in samples])

    def images(self, tokens_T: Tensor, files: Sequence[ImageFile]) -> Images | None:
        """Return a text's images as the backbone reads them; None if there are none. Raises UserError for a file that has changed."""
        tokens_T = tokens_T.to(self.backbone.device)
        return with_positions(self.backbone.model, tokens_T[None], files[0].reader.beside(files, tokens_T)) if files else None


@dataclass(frozen=True)
class FeaturesWithCache(Features):
    """Features with the KV cache from which the backbone can continue after any position."""

    cache: DynamicCache | None = None
    """The backbone's keys and values of all positions."""


class LiveWithCache(LiveFeatures):
    """The live backbone; its KV cache is kept with the features."""

    def read(self, batch: Batch) -> FeaturesWithCache:
        cache = DynamicCache()  # without a configuration, so that sliding layers keep all keys
        return FeaturesWithCache(**vars(self.read_into(cache, batch)), cache=cache)


def taps_of(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """Return the taps for all drafters: in their own order if all have the same, else the sorted union."""
    taps = {drafter.taps for drafter in drafters}
    return taps.pop() if len(taps) == 1 else tuple(sorted({tap for each in taps for tap in each}))


def require_packable(recipe: Recipe, backbone: Backbone) -> None:
    """Raise UserError for packed rows with a backbone that follows no mask, unless their features are those of single samples."""
    follows_none = backbone.recurrent is not None or backbone.no_trees is not None
    if recipe.data.packing and recipe.cache.dir is None and backbone.whole and follows_none:
        fault = "has recurrent layers, which follow no mask" if backbone.no_trees is None else "follows no mask"
        unless = "unless from features that headstart cache has written (cache.dir)"
        raise UserError(f"{type(backbone.model).__name__} {fault}: no packing (data.packing=false), {unless}")


def require_on_policy(recipe: Recipe, backbone: Backbone, drafters: Mapping[str, Drafter]) -> None:
    """Raise UserError if on-policy training is requested for a drafter or backbone that does not support it."""
    for name, single in recipe.per_drafter().items():
        if not single.objective.on_policy:
            continue
        what = f"objective.on_policy={single.objective.on_policy:g}"
        if backbone.no_trees is not None:
            raise UserError(f"{what} scores trees of drafts with the backbone; {backbone.no_trees}: set it to 0")
        if backbone.recurrent is not None:
            raise UserError(f"{what}: {type(backbone.model).__name__} has recurrent layers, which follow no mask; set it to 0")
        if recipe.backbone.shard:
            raise UserError(f"{what}: drafts are read by each process for itself, and backbone.shard has all read alike; set either back")
        limit = backbone.rope_limit
        if limit is not None and recipe.data.max_length > limit:
            fault = f"the rotary frequencies of {type(backbone.model).__name__} change after {limit} positions"
            remedy = f"set it to 0, or data.max_length={recipe.data.max_length} to at most {limit}"
            raise UserError(f"{what}: {fault}, so proposals cannot be read behind longer texts; {remedy}")
        kind, drafter = single.drafter["kind"], drafters[name]
        if drafter.trained_depth < 2:
            raise UserError(f"{what} needs a drafter that goes on from its proposals; {kind} has drafter.depth=1: raise it, or set it to 0")
        if not drafter.sequential:
            raise UserError(f"{what}: what {kind} drafts does not depend on its own proposals, so it learns nothing from them; set it to 0")
