"""Where the features of a batch come from: the backbone, reading it now, or what was kept of an earlier reading.

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
from headstart.training.data.packing import Batch, documents_apart, restarting
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
    """A drafter cannot tell one from another."""

    teacher: Teacher

    @abstractmethod
    def read(self, batch: Batch) -> Features:
        """The features of the batch, on its device, with what to learn and the documents."""


def taps_of(drafters: Sequence[Drafter]) -> tuple[int, ...]:
    """What all of them read: the taps of the only one as it orders them, the union of several."""
    found = {drafter.taps for drafter in drafters}
    return found.pop() if len(found) == 1 else tuple(sorted({tap for taps in found for tap in taps}))


def require_packable(recipe: Recipe, backbone: Backbone) -> None:
    """Raise UserError for packed rows that a backbone with recurrent layers would have to read; from a cache it reads samples alone."""
    if recipe.data.packing and recipe.cache.dir is None and backbone.recurrent is not None:
        raise UserError(
            f"{type(backbone.model).__name__} has recurrent layers, which follow no mask: no packing (data.packing=false), "
            "unless from features that headstart cache has written (cache.dir)"
        )


class Live(FeatureSource):
    """The backbone, in its own dtype, as when decoding."""

    def __init__(self, backbone: Backbone, taps: tuple[int, ...]) -> None:
        self.backbone, self.teacher, self.taps = backbone, backbone, taps

    def read(self, batch: Batch) -> Features:
        tokens_BT, document_BT = batch.tokens_BT, batch.document_BT
        if batch.packed:
            attention_mask = documents_apart(document_BT, self.backbone.windows)
            features = self.backbone.read(tokens_BT, None, restarting(document_BT), attention_mask, self.taps)
        else:   # causal: padding on the right is seen by nothing before it
            features = self.backbone.read(tokens_BT, taps=self.taps)
        return replace(features, loss_mask_BT=batch.loss_mask_BT, document_BT=document_BT)
