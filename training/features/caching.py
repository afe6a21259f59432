"""``headstart cache``: write a recipe's feature cache; prints its size before and its rounding error after.

A sample is one forward pass of the backbone. Disk space is checked before anything is written. Complete shards are renamed into place, so
the same command resumes after a kill. Several processes may write to one cache: each locks the shard it is writing.

Shape suffixes: C, P positions, V vocabulary.
"""

import json
import os
import shutil
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.heads.backbone.model_config import end_tokens
from headstart.heads.layers.start_values import probe_tokens
from headstart.heads.methods import construct_drafter
from headstart.support.errors import UserError
from headstart.support.files import discard_unfinished, locked, require_folder
from headstart.support.text import gigabytes
from headstart.training.data.batches import batches_by_length, collate, samples_hash
from headstart.training.data.data import checked_tokenizer, load_for
from headstart.training.data.kept import Splits
from headstart.training.data.samples import Sample
from headstart.training.data.tokenise import begun_at, now, prints_date
from headstart.training.features.cached import SUPPLEMENT, computed, evaluated, read_supplement
from headstart.training.features.codec import CHUNK, CacheFormat, Record, concatenate, save_tensors, single_row, with_teacher
from headstart.training.features.manifest import Manifest, cached_time, contents_of, free_bytes, open_shard, plan_shards, read_manifest
from headstart.training.features.served import FOLDER, KeptFeatures
from headstart.training.features.source import FeatureSource, open_for_training, taps_of
from headstart.training.recipe.recipe import Recipe, split_drafter

MEASURED_POSITIONS = 512
"""Label positions per shard at which the rounding error is measured."""
SPARE_BYTES = 64 * 2**20
"""Disk space to leave free."""
LOCKS = ".locks"


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
    if (free := report["bytes_free"]) < (needed := report["bytes_missing"]) + SPARE_BYTES:
        remedy = "make room, choose another cache.dir, or keep less: cache.dtype=int8 or a lower data.limit"
        raise UserError(f"{planned.manifest.folder} needs {gigabytes(needed)} and the disk has {gigabytes(free)} free; {remedy}")
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
    backbone, taps = _open(recipe)
    form = CacheFormat.of(backbone, taps, cache.dtype)
    if prints_date(recipe, tokenizer):
        recipe = begun_at(recipe, [cached_time(folder)], now())
    splits = load_for(recipe, backbone, tokenizer, images, end_tokens(backbone.model.generation_config), bar=True)
    contents = contents_of(splits.train, form, backbone, tokenizer, recipe.data)
    manifest = read_manifest(folder)
    if manifest is None:
        manifest = Manifest(folder, contents, plan_shards(splits.train, form, cache.shard_mb))
    manifest.require(contents)
    return PlannedCache(manifest, replace(form, taps=manifest.taps), splits, backbone)


def open_kept(recipe: Recipe) -> KeptFeatures:
    """Return what keeps the hidden states of answers for a recipe's cache. Raises UserError."""
    backbone, taps = _open(recipe)
    assert recipe.cache.dir is not None and isinstance(backbone, HeadOnlyBackbone)
    require_folder("cache.dir", recipe.cache.dir)
    return KeptFeatures(recipe, backbone, taps)


def _open(recipe: Recipe) -> tuple[Backbone, tuple[int, ...]]:
    """Load what writing a recipe's cache needs of the backbone, on this process's accelerator if a launcher started several: all of it,
    unless servers run it. Returns the taps of the recipe's drafters too. Raises UserError.
    """
    rank = os.environ.get("LOCAL_RANK")
    device = torch.device("cuda", int(rank)) if rank is not None and torch.cuda.is_available() else None
    backbone = open_for_training(recipe.but({"cache": {"dir": None}}), device)
    drafters = [split_drafter(single.drafter) for single in recipe.per_drafter().values()]
    return backbone, taps_of([construct_drafter(options.kind, backbone, arguments) for options, arguments in drafters])


def _print_sizes(planned: PlannedCache) -> dict[str, Any]:
    """Print what will be written and where; returns it for the report."""
    manifest, form, samples, tokens = planned.manifest, planned.form, planned.splits.train, planned.splits.stats.tokens
    sizes, unwritten = [form.size(len(sample.tokens)) for sample in samples], manifest.missing()
    total, missing = sum(sizes), sum(sum(sizes[slice(*manifest.shards[number])]) for number in unwritten)
    free, shards = free_bytes(manifest.folder), len(manifest.shards)
    taps = f"taps {', '.join(map(str, form.taps))} and " if form.taps else ""
    print(
        f"data      {planned.splits}\n"
        f"cache     {manifest.folder}: {taps}the final hidden state, {form.dtype}\n"
        f"size      {gigabytes(total)}, {total / tokens:,.0f} bytes per token, in {shards} shards; "
        f"{gigabytes(missing)} in {len(unwritten)} shards still to write, {gigabytes(free)} free",
        file=sys.stderr,
    )
    return {
        "dir": str(manifest.folder), "samples": len(samples), "tokens": tokens, "shards": shards,
        "bytes": total, "bytes_missing": missing, "bytes_per_token": total / tokens, "bytes_free": free,
    }  # fmt: skip


def write_missing(manifest: Manifest, form: CacheFormat, splits: Splits, source: FeatureSource) -> int:
    """Write missing shards that no other process is writing, and the supplement; returns the number of shards."""
    samples = splits.train
    manifest.write()
    write_supplement(manifest, form, source, splits)
    missing, written = manifest.missing(), 0
    total = sum(len(sample.tokens) for number in missing for sample in samples[slice(*manifest.shards[number])])
    with tqdm(total=total, desc="caching", unit="token", unit_scale=True) as bar:
        for number in missing:
            with locked(manifest.folder / LOCKS / str(number), "cache.dir") as mine:
                if mine and not manifest.shard(number).exists():
                    discard_unfinished(manifest.shard(number))
                    _write_shard(manifest, form, samples, source, number, bar)
                    written += 1
    if not manifest.missing():
        shutil.rmtree(manifest.folder / LOCKS, ignore_errors=True)
    return written


def write_supplement(manifest: Manifest, form: CacheFormat, source: FeatureSource, splits: Splits) -> None:
    """Write a cache's supplement, unless it is there."""
    path = manifest.folder / SUPPLEMENT
    with locked(manifest.folder / LOCKS / "supplement", "cache.dir", wait=True):
        if read_supplement(manifest) is not None:
            return
        held_out = evaluated(splits.eval)
        probed = source.probe(probe_tokens(source.backbone))
        tensors: Record = {"probe.tokens": probed.tokens_BT[0], "probe.hidden": probed.hidden_BTD[0]}
        tensors |= {f"probe.tap.{tap}": tensor[0] for tap, tensor in (probed.taps or {}).items()}
        for i in range(len(held_out)):
            features = with_teacher(source.read(collate(held_out, [[i]]).to(source.backbone.device)), source.backbone)
            tensors |= {f"held.{i}.{name}": tensor for name, tensor in form.encode(features).items()}
        header = {"cache": manifest.id, "held_out": samples_hash(held_out), "lacks_last": str(source.lacks_last)}
        save_tensors({name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}, path, header)


def _write_shard(manifest: Manifest, form: CacheFormat, samples: list[Sample], source: FeatureSource, number: int, bar: tqdm) -> None:
    backbone = source.backbone
    records: dict[int, Record] = {}
    errors: list[dict[str, Tensor]] = []
    for indices in batches_by_length(samples, range(*manifest.shards[number])):
        batch = collate(samples, [[i] for i in indices]).to(backbone.device)
        features = with_teacher(source.read(batch), backbone)
        for row, i in enumerate(indices):
            alone = single_row(features, row, len(samples[i].tokens))
            records[i] = form.encode(alone)
            if sum(len(each["teacher_kl"]) for each in errors) < MEASURED_POSITIONS:
                single = collate(samples, [[i]]).to(backbone.device)
                errors.append(rounding_errors(alone, form.decode(records[i], single, form.taps), backbone))
        bar.update(sum(len(samples[i].tokens) for i in indices))
    measured = {name: torch.cat([each[name] for each in errors]) for name in errors[0]}
    means = {name: values.mean().item() for name, values in measured.items() if len(values)}
    header = {"cache": manifest.id, "error": json.dumps(means)}
    save_tensors(concatenate([records[i] for i in sorted(records)]), manifest.shard(number), header)


@torch.no_grad()
def rounding_errors(live: Features, cached: Features, backbone: Backbone) -> dict[str, Tensor]:
    """Return the errors of cached features per position.

    For states, the distance to the live state relative to its norm; for the teacher's distribution at label positions, KL(live | cached)
    in nats and the total variation.
    """
    pairs = {f"tap.{tap}": (tensor, (cached.taps or {})[tap]) for tap, tensor in (live.taps or {}).items()}
    pairs["hidden"] = (live.hidden_BTD, cached.hidden_BTD)
    errors = {name: ((a - b).float().norm(dim=-1) / a.float().norm(dim=-1).clamp(min=1e-20)).flatten() for name, (a, b) in pairs.items()}
    assert live.loss_mask_BT is not None
    kls, tvs = [], []
    label_P = live.loss_mask_BT[0, 1:].nonzero().flatten()  # whose next token is a label: the teacher is needed there
    for position_C in label_P[:MEASURED_POSITIONS].split(CHUNK):
        p_CV = backbone.readout(live.hidden_BTD[0, position_C]).float().softmax(-1)
        cached_CV = backbone.readout(cached.hidden_BTD[0, position_C]).float().log_softmax(-1)
        kls.append((torch.special.xlogy(p_CV, p_CV) - p_CV * cached_CV).sum(-1))
        tvs.append((p_CV - cached_CV.exp()).abs().sum(-1) / 2)
    return errors | {"teacher_kl": torch.cat(kls), "teacher_tv": torch.cat(tvs)}


def measured_errors(manifest: Manifest) -> dict[str, float]:
    """Return the mean over shards of the errors measured during writing."""
    shards = [json.loads(open_shard(manifest, number).metadata()["error"]) for number in range(len(manifest.shards))]
    names = dict.fromkeys(name for errors in shards for name in errors)
    return {name: statistics.fmean(errors[name] for errors in shards if name in errors) for name in names}
