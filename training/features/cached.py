"""Features from a cache written by ``headstart cache``, and the choice between cached and live features.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.support.pytree import map_tensors
from headstart.training.data.batches import Batch
from headstart.training.data.sample import Sample
from headstart.training.features.codec import CacheFormat, concatenate
from headstart.training.features.manifest import MANIFEST, Manifest, ShardReader, contents_of, format_of, read_manifest
from headstart.training.features.served import ServedFeatures
from headstart.training.features.source import FeatureSource, LiveFeatures, taps_of
from headstart.training.features.supplement import FILE as SUPPLEMENT
from headstart.training.features.supplement import nearest_taps, read_supplement
from headstart.training.recipe.recipe import Recipe


class CachedFeatures(FeatureSource):
    """Reads samples from a complete feature cache; the backbone is not run."""

    def __init__(self, manifest: Manifest, form: CacheFormat, taps: tuple[int, ...], backbone: Backbone) -> None:
        self.reader, self.form, self.taps, self.backbone = ShardReader(manifest), form, taps, backbone
        supplement = read_supplement(manifest, form)
        if supplement is None:
            raise UserError(f"{manifest.folder} lacks {SUPPLEMENT}; run headstart cache with this recipe to write it")
        self.supplement = supplement

    def read(self, batch: Batch) -> Features:
        record = concatenate([self.reader.sample(index) for row in batch.members for index in row])
        return self.form.decode(record, batch, self.taps)

    def probe(self, tokens_1T: Tensor) -> Features:
        """Return the features of the tokens that were probed when the cache was written."""
        return map_tensors(lambda tensor: tensor.to(self.backbone.device), self.supplement.probe())

    def for_starts(self, taps: tuple[int, ...]) -> FeatureSource:
        return _ForStarts(self) if self.supplement.lacks_last else self

    def read_held_out(self, samples: Sequence[Sample]) -> Iterator[Features]:
        yield from self.supplement.read_held_out(samples, self.backbone.device)


class _ForStarts(FeatureSource):
    """A cache without the features that are none."""

    def __init__(self, cached: CachedFeatures) -> None:
        self.cached, self.backbone = cached, cached.backbone

    def read(self, batch: Batch) -> Features:
        features = self.cached.read(batch)
        document_BT = batch.document_BT
        last_BT = document_BT != torch.nn.functional.pad(document_BT[:, 1:], (0, 1), value=-1)
        return replace(features, document_BT=document_BT.masked_fill(last_BT, -1))

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
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"no features in {folder}: found no {MANIFEST}; run headstart cache with this recipe, or set cache.dir=null")
    manifest.require(contents_of(samples, form, backbone, tokenizer, recipe.data))
    cached = CachedFeatures(manifest, replace(form, taps=manifest.taps), taps, backbone)
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
