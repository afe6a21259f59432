"""What ``headstart cache`` does: from a recipe to a features cache, with its size said before and its error after."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.support.errors import UserError
from headstart.support.units import gigabytes
from headstart.training.data.data import Splits, load_data, require_vocabulary
from headstart.training.features.codec import CacheFormat
from headstart.training.features.manifest import Manifest, contents_of, form_of, plan, read_manifest, size_of, written_form
from headstart.training.features.source import taps_of
from headstart.training.features.stored import require_taps_alone
from headstart.training.features.writer import bytes_missing, fill, measured_errors
from headstart.training.recipe.recipe import Recipe
from headstart.training.run.trainer import build


@dataclass(frozen=True)
class Planned:
    """A cache as it will be, or as far as it is."""

    manifest: Manifest
    form: CacheFormat
    splits: Splits
    backbone: Backbone


def write_cache(recipe: Recipe, estimate: bool) -> dict[str, Any]:
    """Write what is missing of the recipe's cache, or with ``estimate`` only say what it takes; the result as JSON holds it."""
    planned = _plan(recipe)
    sizes = _sizes(planned)
    if estimate:
        return sizes
    start = time.perf_counter()
    written = fill(planned.manifest, planned.form, planned.splits.train, planned.backbone)
    missing = len(planned.manifest.missing())
    result = sizes | {"written": written, "seconds": time.perf_counter() - start, "missing": missing}
    if missing:
        print(f"wrote {written} shards; {missing} are being written by another process", file=sys.stderr)
        return result
    errors = measured_errors(planned.manifest)
    states = max((value for name, value in errors.items() if not name.startswith("teacher")), default=0.0)
    print(
        f"done: wrote {written} shards in {result['seconds']:.0f} s; states are {states:.2%} off at most (mean over positions), "
        f"the backbone's distribution {errors.get('teacher_kl', 0):.1e} nats (KL), {errors.get('teacher_tv', 0):.2%} (total variation)",
        file=sys.stderr,
    )
    return result | {"errors": errors}


def _plan(recipe: Recipe) -> Planned:
    """Raises UserError for a recipe without a cache to write, and for a folder that holds another one."""
    settings, where = recipe.cache, recipe.backbone
    if settings.dir is None:
        raise UserError("cache.dir is not set; name the folder to write to, as in cache.dir=out/features")
    if settings.mode == "lru":
        raise UserError("cache.mode=lru is filled by training, as it goes; set cache.mode=full to write everything now")
    backbone = load_backbone(
        where.path, dtype=where.dtype, trust_remote_code=where.trust_remote_code, attention=where.attention, device=_device()
    )
    drafters = [build(one, backbone) for one in recipe.per_drafter().values()]
    form = form_of(settings, backbone, taps_of(drafters))
    require_taps_alone(recipe, drafters, form)
    tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
    splits = load_data(recipe.data, tokenizer, backbone.max_positions or sys.maxsize)
    require_vocabulary(splits, backbone.vocab)
    expected = contents_of(splits.train, form, backbone, tokenizer, recipe.data)
    manifest = read_manifest(Path(settings.dir))
    if manifest is None:
        manifest = Manifest(Path(settings.dir), "full", expected, plan(splits.train, form, settings.shard_mb))
    manifest.require(expected, "full")
    return Planned(manifest, written_form(form, manifest), splits, backbone)


def _sizes(planned: Planned) -> dict[str, Any]:
    """Say, before anything is written, what will be."""
    manifest, form, samples, tokens = planned.manifest, planned.form, planned.splits.train, planned.splits.stats.tokens
    total, missing = sum(size_of(sample, form) for sample in samples), bytes_missing(manifest, form, samples)
    there = next(path for path in (manifest.folder, *manifest.folder.absolute().parents) if path.exists())
    free, shards = shutil.disk_usage(there).free, len(manifest.shards)
    kept = f"the {form.top} likeliest tokens" if form.top else "the final hidden state"
    taps = f"taps {', '.join(map(str, form.taps))} and " if form.taps else ""
    print(
        f"data      {planned.splits.stats}\n"
        f"cache     {manifest.folder}: {taps}{kept}, {form.store}\n"
        f"size      {gigabytes(total)}, {total / tokens:,.0f} bytes a token, in {shards} shards; "
        f"{gigabytes(missing)} in {len(manifest.missing())} shards still to write, {gigabytes(free)} free",
        file=sys.stderr,
    )
    return {
        "dir": str(manifest.folder), "samples": len(samples), "tokens": tokens, "shards": shards,
        "bytes": total, "bytes_missing": missing, "bytes_a_token": total / tokens, "bytes_free": free,
    }  # fmt: skip


def _device() -> torch.device | None:
    """The accelerator of this process, where a launcher has started several."""
    rank = os.environ.get("LOCAL_RANK")
    return torch.device("cuda", int(rank)) if rank is not None and torch.cuda.is_available() else None
