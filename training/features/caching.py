"""``headstart cache``: write a recipe's feature cache; prints its size before and its rounding error after."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.heads.backbone.model_config import end_tokens
from headstart.heads.base import Drafter
from headstart.heads.methods import construct_drafter
from headstart.support.errors import UserError
from headstart.support.files import require_folder
from headstart.support.text import gigabytes
from headstart.training.data.data import checked_tokenizer, load_data, require_vocabulary
from headstart.training.data.kept import Splits
from headstart.training.data.tokenise import begun_at, now, prints_date
from headstart.training.features.backbone import open_to_cache
from headstart.training.features.cached import computed
from headstart.training.features.codec import CacheFormat
from headstart.training.features.kept import FOLDER, KeptFeatures
from headstart.training.features.manifest import Manifest, cached_time, contents_of, format_of, plan_shards, read_manifest
from headstart.training.features.source import FeatureSource, taps_of
from headstart.training.features.writer import bytes_missing, free_bytes, measured_errors, write_missing
from headstart.training.recipe.recipe import Recipe, split_drafter


@dataclass(frozen=True)
class PlannedCache:
    """A complete feature cache as planned, written or not."""

    manifest: Manifest
    form: CacheFormat
    splits: Splits
    backbone: Backbone


def write_cache(recipe: Recipe, estimate: bool) -> dict[str, Any]:
    """Write the missing part of the recipe's cache (with ``estimate``, only print its size); returns the report for ``--json``."""
    planned = _plan(recipe)
    report = _print_sizes(planned)
    if estimate:
        return report
    start = time.perf_counter()
    with closing(_source(recipe, planned)) as source:
        written = write_missing(planned.manifest, planned.form, planned.splits, source)
        missing = len(planned.manifest.missing())
        if isinstance(source, KeptFeatures) and not missing:
            source.discard()
    report |= {"shards_written": written, "seconds": time.perf_counter() - start, "shards_missing": missing}
    if missing:
        print(f"wrote {written} shards; {missing} are being written by another process", file=sys.stderr)
        return report
    errors = measured_errors(planned.manifest)
    states = max((value for name, value in errors.items() if not name.startswith("teacher")), default=0.0)
    print(
        f"done: wrote {written} shards in {report['seconds']:.0f} s; mean relative error of a state at most {states:.2%}; of the "
        f"backbone's distribution {errors.get('teacher_kl', 0):.1e} nats (KL), {errors.get('teacher_tv', 0):.2%} (total variation)",
        file=sys.stderr,
    )
    return report | {"errors": errors}


def _source(recipe: Recipe, planned: PlannedCache) -> FeatureSource:
    """Return what computes the features: the backbone, servers, or what was kept while a server answered."""
    kept = planned.manifest.folder / FOLDER
    if recipe.features.endpoint is not None and kept.is_dir() and isinstance(planned.backbone, HeadOnlyBackbone):
        return KeptFeatures(recipe, planned.backbone, planned.form.taps)
    return computed(recipe, planned.backbone, planned.form.taps)


def _plan(recipe: Recipe) -> PlannedCache:
    """Plan a recipe's cache. Raises UserError if ``cache.dir`` is not set or holds another cache."""
    cache = recipe.cache
    if cache.dir is None:
        raise UserError("cache.dir is not set; name the folder to write to, as in cache.dir=out/features")
    folder = require_folder("cache.dir", cache.dir)
    tokenizer, images = checked_tokenizer(recipe)
    backbone = open_to_cache(recipe, _device())
    drafters = [_build(one, backbone) for one in recipe.per_drafter().values()]
    form = format_of(cache, backbone, taps_of(drafters))
    if prints_date(recipe, tokenizer):
        recipe = begun_at(recipe, [cached_time(folder)], now())
    ends = end_tokens(backbone.model.generation_config)
    splits = load_data(recipe.data, tokenizer, backbone.max_positions or sys.maxsize, ends=ends, images=images)
    require_vocabulary(splits, backbone.vocab)
    contents = contents_of(splits.train, form, backbone, tokenizer, recipe.data)
    manifest = read_manifest(folder)
    if manifest is None:
        manifest = Manifest(folder, contents, plan_shards(splits.train, form, cache.shard_mb))
    manifest.require(contents)
    return PlannedCache(manifest, replace(form, taps=manifest.taps), splits, backbone)


def open_kept(recipe: Recipe) -> KeptFeatures:
    """Return what keeps the hidden states of answers for a recipe's cache. Raises UserError."""
    backbone = open_to_cache(recipe, _device())
    taps = taps_of([_build(one, backbone) for one in recipe.per_drafter().values()])
    assert recipe.cache.dir is not None and isinstance(backbone, HeadOnlyBackbone)
    require_folder("cache.dir", recipe.cache.dir)
    return KeptFeatures(recipe, backbone, taps)


def _build(recipe: Recipe, backbone: Backbone) -> Drafter:
    options, arguments = split_drafter(recipe.drafter)
    return construct_drafter(options.kind, backbone, arguments)


def _print_sizes(planned: PlannedCache) -> dict[str, Any]:
    """Print what will be written and where; returns it for the report."""
    manifest, form, samples, tokens = planned.manifest, planned.form, planned.splits.train, planned.splits.stats.tokens
    total, missing = sum(form.size(len(sample.tokens)) for sample in samples), bytes_missing(manifest, form, samples)
    free, shards = free_bytes(manifest.folder), len(manifest.shards)
    taps = f"taps {', '.join(map(str, form.taps))} and " if form.taps else ""
    print(
        f"data      {planned.splits}\n"
        f"cache     {manifest.folder}: {taps}the final hidden state, {form.dtype}\n"
        f"size      {gigabytes(total)}, {total / tokens:,.0f} bytes per token, in {shards} shards; "
        f"{gigabytes(missing)} in {len(manifest.missing())} shards still to write, {gigabytes(free)} free",
        file=sys.stderr,
    )
    return {
        "dir": str(manifest.folder), "samples": len(samples), "tokens": tokens, "shards": shards,
        "bytes": total, "bytes_missing": missing, "bytes_per_token": total / tokens, "bytes_free": free,
    }  # fmt: skip


def _device() -> torch.device | None:
    """Return this process's accelerator if a launcher started several processes."""
    rank = os.environ.get("LOCAL_RANK")
    return torch.device("cuda", int(rank)) if rank is not None and torch.cuda.is_available() else None
