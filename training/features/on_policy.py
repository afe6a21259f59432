"""Learning on drafts of its own (``objective.on_policy``): what a run needs for it, and what cannot have it.

How it is done is in `objective.on_policy_loss`. It takes a backbone that is there at every step, keeps what it has read, and follows masks;
and a drafter whose proposals depend on those before them.
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers import DynamicCache

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.training.data.packing import Batch, documents_apart, restarting
from headstart.training.features.source import FeatureSource, Live
from headstart.training.objective.on_policy import FeaturesWithCache
from headstart.training.recipe.recipe import Recipe


class LiveWithCache(Live):
    """The backbone, whose keys and values stay until the batch is learned."""

    def read(self, batch: Batch) -> FeaturesWithCache:
        cache, document_BT = DynamicCache(), batch.document_BT   # without a configuration: sliding layers keep all of their keys
        positions_BT, attention_mask = None, None
        if batch.packed:
            positions_BT, attention_mask = restarting(document_BT), documents_apart(document_BT, self.backbone.windows)
        read = self.backbone.read(batch.tokens_BT, cache, positions_BT, attention_mask, self.taps)
        return FeaturesWithCache(read.tokens_BT, read.hidden_BTD, read.taps, batch.loss_mask_BT, document_BT, cache)


def with_cache(recipe: Recipe, source: FeatureSource) -> FeatureSource:
    """The source of a run: if some head learns on drafts of its own, one that remembers."""
    if not any(one.objective.on_policy for one in recipe.apart().values()):
        return source
    assert isinstance(source, Live)   # a recipe with a cache is refused when it is read
    return LiveWithCache(source.backbone, source.taps)


def require_on_policy(recipe: Recipe, backbone: Backbone, drafters: Mapping[str, Drafter]) -> None:
    """Raise UserError if a head is to learn on drafts of its own, and cannot with this backbone or by its kind."""
    for name, one in recipe.apart().items():
        if not one.objective.on_policy:
            continue
        what = f"objective.on_policy={one.objective.on_policy:g}"
        if backbone.recurrent is not None:
            raise UserError(f"{what}: {type(backbone.model).__name__} has recurrent layers, which follow no mask; set it to 0")
        if recipe.backbone.shard:
            raise UserError(f"{what}: drafts are read by each process for itself, and backbone.shard has all read alike; set either back")
        if backbone.turn is not None and recipe.data.max_length > backbone.turn:
            raise UserError(
                f"{what}: the rotary frequencies of {type(backbone.model).__name__} change after {backbone.turn} positions, so proposals "
                f"cannot be read behind longer texts; set it to 0, or data.max_length={recipe.data.max_length} to at most {backbone.turn}"
            )
        kind, drafter = one.drafter["kind"], drafters[name]
        if drafter.trained_depth < 2:
            raise UserError(f"{what} needs a drafter that goes on from its proposals; {kind} has drafter.depth=1: raise it, or set it to 0")
        if not drafter.sequential:
            raise UserError(f"{what}: what {kind} drafts does not depend on its own proposals, so it learns nothing from them; set it to 0")
