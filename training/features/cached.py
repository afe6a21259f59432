"""Features from a cache written by ``headstart cache``, and the choice between cached and live features.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
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
from headstart.training.features.source import FeatureSource, LiveFeatures, Teacher, taps_of
from headstart.training.features.writer import open_teacher
from headstart.training.recipe.recipe import Recipe


class CachedFeatures(FeatureSource):
    """Reads samples from a complete feature cache; the backbone is not run."""

    def __init__(self, manifest: Manifest, form: CacheFormat, taps: tuple[int, ...], teacher: Teacher) -> None:
        self.reader, self.form, self.taps, self.teacher = ShardReader(manifest), form, taps, teacher

    def read(self, batch: Batch) -> Features:
        record = concatenate([self.reader.sample(index) for row in batch.members for index in row])
        return self.form.decode(record, batch, self.taps)


def open_source(
    recipe: Recipe, drafters: Sequence[Drafter], tokenizer: PreTrainedTokenizerBase, samples: list[Sample]
) -> tuple[FeatureSource, str | None]:
    """Return the feature source shared by a run's drafters, and a summary of the feature cache, if any.

    Raises UserError if the cache is missing, incomplete, or has other contents.
    """
    backbone, cache, taps = drafters[0].backbone, recipe.cache, taps_of(drafters)
    if cache.dir is None:
        return LiveFeatures(backbone, taps), None
    form, folder = format_of(cache, backbone, taps), Path(cache.dir)
    require_taps_only(recipe, drafters, form)
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"no features in {folder}: found no {MANIFEST}; run headstart cache with this recipe, or set cache.dir=null")
    manifest.require(contents_of(samples, form, backbone, tokenizer, recipe.data))
    form = format_on_disk(form, manifest)
    teacher = open_teacher(manifest, form, samples, LiveFeatures(backbone, form.taps))
    return CachedFeatures(manifest, form, taps, teacher), f"{folder}: {len(manifest.shards)} shards, {cache.dtype}"


def require_taps_only(recipe: Recipe, drafters: Sequence[Drafter], form: CacheFormat) -> None:
    """Raise UserError if the format lacks the final hidden state and a drafter or loss term needs it."""
    if not form.top_k:
        return
    for one, drafter in zip(recipe.per_drafter().values(), drafters, strict=True):
        regresses = bool(one.objective.terms.get("features"))
        if regresses or drafter.reads_hidden:
            reader = "objective.terms.features learns" if regresses else f"{one.drafter['kind']} reads"
            raise UserError(f"cache.teacher=topk keeps no final hidden state, which {reader}; set cache.teacher=hidden")
