"""Filling a features cache: the backbone reads every sample once.

The room it takes is known before it starts. A shard is written under another name and renamed when it is whole, so a killed
writer is resumed by running it again. Several processes may write one cache: each shard is locked by who writes it, and the
lock ends with its process, however that ends.

Shape suffixes: C positions, V vocabulary.
"""
from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.support.errors import UserError
from headstart.support.files import atomic, discard_unfinished, locked
from headstart.support.units import gigabytes
from headstart.training.data.data import Sample
from headstart.training.data.packing import collate
from headstart.training.features.codec import CHUNK, CacheFormat, Encoded, TopTeacher, join, row_of, taught
from headstart.training.features.manifest import Manifest, open_shard, size_of
from headstart.training.features.source import Live, Teacher

AT_ONCE = 8192
"""Positions the backbone reads in one forward, padding included."""
MEASURED = 512
"""Learned positions of a shard whose error is measured."""
FIRST = 4096
"""Learned positions that say how the rest of the mass is spread."""
SPARE = 64 * 2**20
"""Bytes to leave free on the disk."""
TAIL = "tail.safetensors"


@dataclass(frozen=True)
class Work:
    """Of what, in what form, from where."""

    manifest: Manifest
    form: CacheFormat
    samples: list[Sample]
    live: Live
    teacher: Teacher
    """Reads out what was kept."""


def bytes_missing(manifest: Manifest, form: CacheFormat, samples: Sequence[Sample]) -> int:
    """What the shards that are not there yet will take."""
    return sum(size_of(sample, form) for number in manifest.missing() for sample in samples[slice(*manifest.shards[number])])


def require_room(folder: Path, needed: int) -> None:
    """Raise UserError if the disk has not as much."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed + SPARE:
        raise UserError(
            f"{folder} needs {gigabytes(needed)} and the disk has {gigabytes(free)} free; make room, choose another cache.dir, or keep "
            "less: cache.dtype=int8, cache.teacher=topk, a lower data.limit, or cache.mode=lru"
        )


def fill(manifest: Manifest, form: CacheFormat, samples: list[Sample], backbone: Backbone, *, progress: bool = True) -> int:
    """Write the shards that are missing and that no other process is writing; how many those were."""
    require_room(manifest.folder, bytes_missing(manifest, form, samples))
    manifest.write()
    live = Live(backbone, form.taps)
    work = Work(manifest, form, samples, live, open_teacher(manifest, form, samples, live))
    missing, written = manifest.missing(), 0
    total = sum(len(sample.tokens) for number in missing for sample in samples[slice(*manifest.shards[number])])
    with tqdm(total=total, desc="reading", unit="token", unit_scale=True, disable=not progress) as bar:
        for number in missing:
            with locked(manifest.folder / ".locks" / str(number), "cache.dir") as mine:
                if mine and not manifest.shard(number).exists():
                    discard_unfinished(manifest.shard(number))
                    written += 1
                    _write_shard(work, number, bar)
    if not manifest.missing():
        shutil.rmtree(manifest.folder / ".locks", ignore_errors=True)
    return written


def _write_shard(work: Work, number: int, bar: tqdm) -> None:
    manifest, form, samples, live = work.manifest, work.form, work.samples, work.live
    found: dict[int, Encoded] = {}
    errors: list[dict[str, Tensor]] = []
    for indices in _batches(samples, *manifest.shards[number]):
        batch = collate(samples, [[i] for i in indices]).to(live.backbone.device)
        features = live.read(batch)
        for row, i in enumerate(indices):
            alone = row_of(features, row, len(samples[i].tokens))
            found[i] = form.encode(alone, live.backbone.readout)
            if sum(len(one["teacher_kl"]) for one in errors) < MEASURED:
                single = collate(samples, [[i]]).to(live.backbone.device)
                errors.append(errors_of(alone, form.decode(found[i], single, form.taps), live.backbone, work.teacher))
        bar.update(sum(len(samples[i].tokens) for i in indices))
    measured = {name: torch.cat([one[name] for one in errors]) for name in errors[0]}
    means = {name: each.mean().item() for name, each in measured.items() if len(each)}
    header = {"cache": manifest.id, "error": json.dumps(means)}
    save(join([found[i] for i in sorted(found)]), manifest.shard(number), header)


def save(tensors: Encoded, path: Path, header: dict[str, str]) -> None:
    """Whole or not at all. Raises UserError if the disk refuses it."""
    try:
        with atomic(path) as temporary:
            save_file(tensors, temporary, metadata=header)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}") from None


def _batches(samples: list[Sample], first: int, end: int) -> Iterator[list[int]]:
    """Samples of like length together, so that little is padded; the same whichever process asks."""
    batch: list[int] = []
    for i in sorted(range(first, end), key=lambda i: len(samples[i].tokens)):
        if batch and (len(batch) + 1) * len(samples[i].tokens) > AT_ONCE:
            yield batch
            batch = []
        batch.append(i)
    yield batch


@torch.no_grad()
def errors_of(live: Features, kept: Features, backbone: Backbone, teacher: Teacher) -> dict[str, Tensor]:
    """Per position, how far what is kept is from what was read.

    Of states the distance relative to their size; of the backbone's distribution p, at learned positions, KL(p | kept) in nats and
    total variation.
    """
    pairs = {f"tap.{tap}": (tensor, (kept.taps or {})[tap]) for tap, tensor in (live.taps or {}).items()}
    if live.hidden_BTD.shape == kept.hidden_BTD.shape:
        pairs["hidden"] = (live.hidden_BTD, kept.hidden_BTD)
    found = {name: ((a - b).float().norm(dim=-1) / a.float().norm(dim=-1).clamp(min=1e-20)).flatten() for name, (a, b) in pairs.items()}
    assert live.loss_mask_BT is not None
    kls, tvs = [], []
    for place_C in taught(live.loss_mask_BT[0])[:MEASURED].split(CHUNK):
        p_CV = backbone.readout(live.hidden_BTD[0, place_C]).float().softmax(-1)
        kept_CV = teacher.readout(kept.hidden_BTD[0, place_C]).float().log_softmax(-1)
        kls.append((torch.special.xlogy(p_CV, p_CV) - p_CV * kept_CV).sum(-1))
        tvs.append((p_CV - kept_CV.exp()).abs().sum(-1) / 2)
    return found | {"teacher_kl": torch.cat(kls), "teacher_tv": torch.cat(tvs)}


def measured_errors(manifest: Manifest) -> dict[str, float]:
    """Means over the shards of what was measured while they were written."""
    each = [json.loads(open_shard(manifest, number).metadata()["error"]) for number in range(len(manifest.shards))]
    names = dict.fromkeys(name for one in each for name in one)
    return {name: statistics.fmean(one[name] for one in each if name in one) for name in names}


def open_teacher(manifest: Manifest, form: CacheFormat, samples: list[Sample], live: Live) -> Teacher:
    """What turns the kept final states, or what stands for them, into logits. Made of the first samples, and kept, if need be."""
    if not form.top:
        return live.backbone
    path = manifest.folder / TAIL
    if not path.exists():   # a finished cache may lie where nothing can be written
        with locked(manifest.folder / ".locks" / "tail", "cache.dir", wait=True):
            if not path.exists():
                save({"tail_V": _tail(form, samples, live)}, path, {"cache": manifest.id})
    tail_V = load_file(path, device=str(live.backbone.device))["tail_V"]
    return TopTeacher(tail_V)


@torch.no_grad()
def _tail(form: CacheFormat, samples: list[Sample], live: Live) -> Tensor:
    """Mass of each token, summed over positions where it is none of the likeliest; a little for those that always are."""
    assert form.top
    sum_V, count = torch.zeros(form.vocab, device=live.backbone.device), 0
    for i, sample in enumerate(samples):
        if count >= FIRST:
            break
        features = live.read(collate(samples, [[i]]).to(live.backbone.device))
        for place_C in taught(sample.loss_mask)[: FIRST - count].split(CHUNK):
            p_CV = live.backbone.readout(features.hidden_BTD[0, place_C.to(live.backbone.device)]).float().softmax(-1)
            sum_V += p_CV.scatter(-1, p_CV.topk(form.top, -1).indices, 0).sum(0)
            count += len(place_C)
    return (sum_V + 1e-3 * sum_V.mean()).clamp(min=1e-12).cpu()
