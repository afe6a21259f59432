"""Features from a cache written by ``headstart cache``, and the choice between cached and live features.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.support.pytree import map_tensors
from headstart.training.data.packing import Batch
from headstart.training.data.sample import Sample
from headstart.training.features.codec import CacheFormat, concatenate
from headstart.training.features.manifest import (
    MANIFEST,
    Manifest,
    ShardReader,
    contents_of,
    format_of,
    format_on_disk,
    read_manifest,
)  # fmt: skip
from headstart.training.features.served import ServedFeatures
from headstart.training.features.source import FeatureSource, LiveFeatures, taps_of
from headstart.training.features.supplement import Supplement, nearest_taps, read_supplement
from headstart.training.features.writer import open_teacher
from headstart.training.recipe.recipe import Recipe


class CachedFeatures(FeatureSource):
    """Reads samples from a complete feature cache; the backbone is not run."""

    def __init__(self, manifest: Manifest, form: CacheFormat, taps: tuple[int, ...], backbone: Backbone) -> None:
        self.reader, self.form, self.taps, self.backbone = ShardReader(manifest), form, taps, backbone
        self.teacher = open_teacher(manifest, form, backbone)
        self.supplement = read_supplement(manifest, form)

    def read(self, batch: Batch) -> Features:
        record = concatenate([self.reader.sample(index) for row in batch.members for index in row])
        return self.form.decode(record, batch, self.taps)

    def probe(self, tokens_1T: Tensor) -> Features:
        """Return the features of the tokens that were probed when the cache was written; without them, of its first sample."""
        if self.supplement is not None:
            return map_tensors(lambda tensor: tensor.to(self.backbone.device), self.supplement.probe())
        record = self.reader.sample(0)
        length = int(record["tokens"])
        tokens_1T = torch.zeros(1, length, dtype=torch.int64, device=self.backbone.device)
        batch = Batch(tokens_1T, torch.ones_like(tokens_1T, dtype=torch.bool), torch.zeros_like(tokens_1T), ((0,),))
        features = self.form.decode(record, batch, self.form.taps)
        if self.form.top_k:  # states after a norm are all of one size
            assert features.taps and isinstance(self.backbone, HeadOnlyBackbone)
            return replace(features, hidden_BTD=self.backbone.norm(features.taps[max(features.taps)]))
        return features

    def for_starts(self, taps: tuple[int, ...]) -> FeatureSource | None:
        if self.supplement is None:
            return None if self.form.top_k else self
        return _ForStarts(self, self.supplement)

    def read_held_out(self, samples: Sequence[Sample]) -> Iterator[Features]:
        if self.supplement is not None:
            yield from self.supplement.read_held_out(samples, self.backbone.device)


class _ForStarts(FeatureSource):
    """A cache with the final hidden states of some texts, if its own are of the most likely tokens, and without features that are none."""

    def __init__(self, cached: CachedFeatures, supplement: Supplement) -> None:
        self.cached, self.supplement, self.backbone = cached, supplement, cached.backbone
        self.teacher, self.samples = cached.backbone, supplement.fitted if cached.form.top_k else None

    def read(self, batch: Batch) -> Features:
        features = self.cached.read(batch)
        if self.supplement.lacks_last and (document_BT := features.document_BT) is not None:
            last_BT = document_BT != torch.nn.functional.pad(document_BT[:, 1:], (0, 1), value=-1)
            features = replace(features, document_BT=document_BT.masked_fill(last_BT, -1))
        if not self.cached.form.top_k:
            return features
        hidden_BTD = pad_sequence([self.supplement.hidden(index) for [index] in batch.members], batch_first=True)
        return replace(features, hidden_BTD=hidden_BTD.to(self.backbone.device, self.backbone.dtype))

    def probe(self, tokens_1T: Tensor) -> Features:
        return self.cached.probe(tokens_1T)


def open_source(
    recipe: Recipe, drafters: Sequence[Drafter], tokenizer: PreTrainedTokenizerBase, samples: list[Sample]
) -> tuple[FeatureSource, str | None]:
    """Return the feature source shared by a run's drafters, and a summary of the feature cache, if any.

    Raises UserError if the cache is missing, incomplete, or has other contents.
    """
    backbone, cache, taps = drafters[0].backbone, recipe.cache, taps_of(drafters)
    if cache.dir is None:
        source = computed(recipe, backbone, taps)
        _read_by(backbone, source)
        return source, None if recipe.features.endpoint is None else f"from {', '.join(recipe.features.endpoint)}"
    form, folder = format_of(cache, backbone, taps), Path(cache.dir)
    require_taps_only(recipe, drafters, form)
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"no features in {folder}: found no {MANIFEST}; run headstart cache with this recipe, or set cache.dir=null")
    manifest.require(contents_of(samples, form, backbone, tokenizer, recipe.data))
    cached = CachedFeatures(manifest, format_on_disk(form, manifest), taps, backbone)
    _read_by(backbone, cached)
    return cached, f"{folder}: {len(manifest.shards)} shards, {cache.dtype}"


def computed(recipe: Recipe, backbone: Backbone, taps: tuple[int, ...]) -> FeatureSource:
    """Return the source that computes features, here or on servers. Raises UserError."""
    if recipe.features.endpoint is None:
        return LiveFeatures(backbone, taps)
    if not isinstance(backbone, HeadOnlyBackbone):
        raise UserError("drafter.layers prunes the backbone, whose layers are not here with features.endpoint; give drafter.path instead")
    return ServedFeatures(recipe.features, backbone, taps)


def _read_by(backbone: Backbone, source: FeatureSource) -> None:
    """Have a backbone without layers return the source's features of a few tokens, for start values."""
    if isinstance(backbone, HeadOnlyBackbone):
        backbone.reader = lambda tokens_1T, taps: nearest_taps(source.probe(tokens_1T), taps)


def require_taps_only(recipe: Recipe, drafters: Sequence[Drafter], form: CacheFormat) -> None:
    """Raise UserError if the format lacks the final hidden state and a drafter or loss term needs it."""
    if not form.top_k:
        return
    for one, drafter in zip(recipe.per_drafter().values(), drafters, strict=True):
        regresses = bool(one.objective.terms.get("features"))
        if regresses or drafter.reads_hidden:
            reader = "objective.terms.features learns" if regresses else f"{one.drafter['kind']} reads"
            raise UserError(f"cache.teacher=topk keeps no final hidden state, which {reader}; set cache.teacher=hidden")
