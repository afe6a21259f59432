"""Features of a batch, from the backbone or from a cache: a drafter cannot tell which.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.training.data.packing import Batch, document_masks, document_positions
from headstart.training.recipe.recipe import Recipe


class Teacher(Protocol):
    """Turns final hidden states, or what a cache stores in their place, into the backbone's logits."""

    @property
    def vocab(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def readout(self, hidden: Tensor) -> Tensor:
        """``[..., D]`` -> logits ``[..., V]`` over the backbone's vocabulary."""


class FeatureSource(ABC):
    """Gives the features of batches, and the teacher that turns their final hidden states into logits."""

    teacher: Teacher

    @abstractmethod
    def read(self, batch: Batch) -> Features:
        """Features on the batch's device, with its loss mask and documents."""


class LiveFeatures(FeatureSource):
    """Runs the backbone, in its own dtype as in decoding."""

    def __init__(self, backbone: Backbone, taps: tuple[int, ...]) -> None:
        self.backbone, self.teacher, self.taps = backbone, backbone, taps

    def read(self, batch: Batch) -> Features:
        tokens_BT, document_BT = batch.tokens_BT, batch.document_BT
        if batch.packed:
            attention_mask = document_masks(document_BT, self.backbone.windows)
            features = self.backbone.read(tokens_BT, None, document_positions(document_BT), attention_mask, self.taps)
        else:   # causal: no position sees the padding on its right
            features = self.backbone.read(tokens_BT, taps=self.taps)
        return replace(features, loss_mask_BT=batch.loss_mask_BT, document_BT=document_BT)


def taps_of(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """Taps that serve all drafters: those of one in its own order, the sorted union of several."""
    taps = {drafter.taps for drafter in drafters}
    return taps.pop() if len(taps) == 1 else tuple(sorted({tap for each in taps for tap in each}))


def require_packable(recipe: Recipe, backbone: Backbone) -> None:
    """Raise UserError for packed rows and a backbone with recurrent layers, unless features come from a cache of single samples."""
    if recipe.data.packing and recipe.cache.dir is None and backbone.recurrent is not None:
        raise UserError(
            f"{type(backbone.model).__name__} has recurrent layers, which follow no mask: no packing (data.packing=false), "
            "unless from features that headstart cache has written (cache.dir)"
        )
