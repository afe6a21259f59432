"""Write a feature cache: one forward pass of the backbone per sample.

Disk space is checked before anything is written. Complete shards are renamed into place, so the same command resumes after a kill.
Several processes may write to one cache: each locks the shard it is writing.

Shape suffixes: C, P positions, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.support.errors import UserError
from headstart.support.files import discard_unfinished, locked
from headstart.support.text import gigabytes
from headstart.training.data.batches import batches_by_length, collate
from headstart.training.data.kept import Splits
from headstart.training.data.sample import Sample
from headstart.training.features.codec import CHUNK, CacheFormat, Record, concatenate, single_row, with_teacher
from headstart.training.features.manifest import Manifest, open_shard, save_tensors
from headstart.training.features.source import FeatureSource
from headstart.training.features.supplement import write_supplement

MEASURED_POSITIONS = 512
"""Label positions per shard at which the rounding error is measured."""
SPARE_BYTES = 64 * 2**20
"""Disk space to leave free."""
LOCKS = ".locks"


def bytes_missing(manifest: Manifest, form: CacheFormat, samples: Sequence[Sample]) -> int:
    """Return the size of the shards not written yet."""
    return sum(form.size(len(sample.tokens)) for number in manifest.missing() for sample in samples[slice(*manifest.shards[number])])


def free_bytes(folder: Path) -> int:
    """Return the free space on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


def require_disk_space(folder: Path, needed: int) -> None:
    """Raise UserError if less than ``needed`` bytes (plus `SPARE_BYTES`) are free."""
    free = free_bytes(folder)
    if free < needed + SPARE_BYTES:
        raise UserError(
            f"{folder} needs {gigabytes(needed)} and the disk has {gigabytes(free)} free; make room, choose another cache.dir, or keep "
            "less: cache.dtype=int8 or a lower data.limit"
        )


def write_missing(manifest: Manifest, form: CacheFormat, splits: Splits, source: FeatureSource, *, progress: bool = True) -> int:
    """Write missing shards that no other process is writing, and the supplement; returns the number of shards."""
    samples = splits.train
    require_disk_space(manifest.folder, bytes_missing(manifest, form, samples))
    manifest.write()
    write_supplement(manifest, form, source, splits)
    missing, written = manifest.missing(), 0
    total = sum(len(sample.tokens) for number in missing for sample in samples[slice(*manifest.shards[number])])
    with tqdm(total=total, desc="caching", unit="token", unit_scale=True, disable=not progress) as bar:
        for number in missing:
            with locked(manifest.folder / LOCKS / str(number), "cache.dir") as mine:
                if mine and not manifest.shard(number).exists():
                    discard_unfinished(manifest.shard(number))
                    _write_shard(manifest, form, samples, source, number, bar)
                    written += 1
    if not manifest.missing():
        shutil.rmtree(manifest.folder / LOCKS, ignore_errors=True)
    return written


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
