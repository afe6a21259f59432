"""Learning on drafts of its own (``objective.on_policy``): what a run needs for it, and what cannot have it.

How it is done is in `objective.on_policy_loss`. It takes a backbone that is there at every step, keeps what it has read, and follows masks;
and a drafter whose proposals depend on those before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
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
        if drafter.depth < 2:
            raise UserError(f"{what} needs a drafter that goes on from its proposals; {kind} has drafter.depth=1: raise it, or set it to 0")
        if not follows_guesses(drafter):
            raise UserError(f"{what}: what {kind} drafts does not depend on its own proposals, so it learns nothing from them; set it to 0")


@torch.no_grad()
def follows_guesses(drafter: Drafter) -> bool:
    """Whether depth 1 says something else after another guess of depth 0, whatever its weights happen to be at the start."""
    backbone = drafter.backbone[0]
    tokens_1T = torch.arange(4, device=backbone.device)[None] % backbone.vocab
    features = backbone.read(tokens_1T, taps=drafter.taps).rows(torch.zeros(2, dtype=torch.int64, device=backbone.device))
    guesses_21 = torch.tensor([[0], [1]], device=backbone.device)
    guesses_21 = guesses_21 if drafter.vocabulary is None else drafter.vocabulary[guesses_21]
    same_21 = torch.zeros_like(guesses_21)
    with _shaken(drafter):
        state = drafter.reserve(drafter.begin(features), 4 + 1 + drafter.depth)
        _, state = drafter.step(state, same_21, same_21, 0)
        hidden_21D, _ = drafter.step(state, guesses_21, same_21, 1)
        said_21V = drafter.readout(hidden_21D, 1, guesses_21)
    return not torch.equal(said_21V[0], said_21V[1])


@contextmanager
def _shaken(drafter: Drafter) -> Iterator[None]:
    """With weights off their first values, some of which may be 0."""
    devices = [drafter.backbone[0].device] if drafter.backbone[0].device.type == "cuda" else []
    kept = [weight.clone() for weight in drafter.parameters()]
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        for weight in drafter.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    try:
        yield
    finally:
        for weight, before in zip(drafter.parameters(), kept, strict=True):
            weight.copy_(before)
