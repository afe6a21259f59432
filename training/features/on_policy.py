"""Features for on-policy training (``objective.on_policy``), and its requirements.

The backbone scores the drafter's rollouts at every step, so it must be live, keep its KV cache of the batch, and follow masks. The
drafter's tokens must depend on those drafted before them. The loss is `objective.on_policy_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import DynamicCache

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.training.data.batches import Batch
from headstart.training.features.source import FeatureSource, LiveFeatures
from headstart.training.recipe.recipe import Recipe


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


def with_cache(recipe: Recipe, source: FeatureSource) -> FeatureSource:
    """Return the feature source, with the KV cache if a drafter trains on-policy."""
    if not any(one.objective.on_policy for one in recipe.per_drafter().values()):
        return source
    assert isinstance(source, LiveFeatures)  # recipes with a feature cache are rejected on loading
    return LiveWithCache(source.backbone, source.taps)


def require_on_policy(recipe: Recipe, backbone: Backbone, drafters: Mapping[str, Drafter]) -> None:
    """Raise UserError if on-policy training is requested for a drafter or backbone that does not support it."""
    for name, one in recipe.per_drafter().items():
        if not one.objective.on_policy:
            continue
        what = f"objective.on_policy={one.objective.on_policy:g}"
        if backbone.no_trees is not None:
            raise UserError(f"{what} scores trees of drafts with the backbone; {backbone.no_trees}: set it to 0")
        if backbone.recurrent is not None:
            raise UserError(f"{what}: {type(backbone.model).__name__} has recurrent layers, which follow no mask; set it to 0")
        if recipe.backbone.shard:
            raise UserError(f"{what}: drafts are read by each process for itself, and backbone.shard has all read alike; set either back")
        limit = backbone.rope_limit
        if limit is not None and recipe.data.max_length > limit:
            raise UserError(
                f"{what}: the rotary frequencies of {type(backbone.model).__name__} change after {limit} positions, so proposals "
                f"cannot be read behind longer texts; set it to 0, or data.max_length={recipe.data.max_length} to at most {limit}"
            )
        kind, drafter = one.drafter["kind"], drafters[name]
        if drafter.trained_depth < 2:
            raise UserError(f"{what} needs a drafter that goes on from its proposals; {kind} has drafter.depth=1: raise it, or set it to 0")
        if not drafter.sequential:
            raise UserError(f"{what}: what {kind} drafts does not depend on its own proposals, so it learns nothing from them; set it to 0")
