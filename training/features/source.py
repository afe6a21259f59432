"""Sources of a batch's features: the live backbone, or a cache behind the same interface.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor
from transformers import Cache

from headstart.chat.images import ImageFile
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features, join_features, stack_rows
from headstart.heads.backbone.images import Images, with_positions
from headstart.heads.base import Drafter
from headstart.heads.layers.causal_attention import document_masks, document_positions
from headstart.support.errors import UserError
from headstart.training.data.batches import Batch, collate
from headstart.training.data.sample import Sample
from headstart.training.recipe.recipe import Recipe


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
        return self.backbone.read(tokens_1T, taps=tuple(range(self.backbone.num_layers + 1)))

    def read(self, batch: Batch) -> Features:
        return self.read_into(None, batch)

    def read_into(self, cache: Cache | None, batch: Batch) -> Features:
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


def taps_of(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """Return the taps for all drafters: in their own order if all have the same, else the sorted union."""
    taps = {drafter.taps for drafter in drafters}
    return taps.pop() if len(taps) == 1 else tuple(sorted({tap for each in taps for tap in each}))


def require_packable(recipe: Recipe, backbone: Backbone) -> None:
    """Raise UserError for packed rows with a backbone that follows no mask, unless features come from a cache or a server, which have
    single samples.
    """
    if (
        recipe.data.packing
        and recipe.cache.dir is None
        and backbone.whole
        and (backbone.recurrent is not None or backbone.no_trees is not None)
    ):
        fault = "has recurrent layers, which follow no mask" if backbone.no_trees is None else "follows no mask"
        raise UserError(
            f"{type(backbone.model).__name__} {fault}: no packing (data.packing=false), "
            "unless from features that headstart cache has written (cache.dir)"
        )
