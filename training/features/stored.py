"""Features from a folder: all of them, written before, or as many as fit a budget, kept when they are first read.

Shape suffixes: B batch, T positions.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.support.units import gigabytes
from headstart.training.data.batch_sampler import digest
from headstart.training.data.data import Sample
from headstart.training.data.packing import Batch, collate
from headstart.training.features.codec import CacheFormat, Encoded, join, row_of
from headstart.training.features.manifest import Manifest, Shards, contents, contents_of, form_of, read_manifest, size_of, written_form
from headstart.training.features.source import FeatureSource, Live, Teacher, taps_of
from headstart.training.features.writer import open_teacher, save
from headstart.training.recipe.recipe import Recipe


class Stored(FeatureSource):
    """Every sample from the shards of a whole cache."""

    def __init__(self, manifest: Manifest, form: CacheFormat, taps: tuple[int, ...], teacher: Teacher) -> None:
        self.shards, self.form, self.taps, self.teacher = Shards(manifest), form, taps, teacher

    def read(self, batch: Batch) -> Features:
        kept = join([self.shards.sample(index) for row in batch.members for index in row])
        return self.form.decode(kept, batch, self.taps)


class Recent(FeatureSource):
    """What is read for the first time is kept, a file a sample, until the budget is spent.

    In an epoch every sample is read once, in an order of its own, so throwing out what was used longest ago to make room
    would throw out what is needed soonest: with room for a fraction f of the samples that finds f + (1 - f) ln(1 - f) of them
    (15 % at a half), keeping what is there finds f. So only samples of other runs are thrown out, the longest unused first, and
    no more of them than it takes.
    Samples are known by their tokens: a run on more rows finds those that an earlier one kept.
    """

    def __init__(
        self, manifest: Manifest, form: CacheFormat, taps: tuple[int, ...], samples: list[Sample], live: Live, budget: int
    ) -> None:
        self.folder, self.header, self.form, self.taps, self.live = manifest.folder, {"cache": manifest.id}, form, taps, live
        self.samples = samples
        self.names = [f"{digest([sample])}.safetensors" for sample in samples]
        self.teacher = open_teacher(manifest, form, samples, live)
        self.budget, self.room = budget, 0
        self.found, self.read_anew = 0, 0
        self.holds_all = False
        """Then a batch lacks some samples but not others only if a kill fell between them. It is read anew as a whole: a sample is
        rounded a little otherwise in a batch of another shape, and the run is to go on as if it had not been killed."""

    def make_room(self) -> None:
        """Throw out what the budget has no room for; by one process, before any begins to read."""
        own, files = set(self.names), self._files()
        for path in files:
            if path.name in own:
                os.utime(path)   # used in this run
        used = sum(path.stat().st_size for path in files)
        missing = {name: size_of(sample, self.form) for name, sample in zip(self.names, self.samples, strict=True)}
        wanted = used + sum(missing[name] for name in own - {path.name for path in files})
        for path in sorted(files, key=lambda path: (path.name in own, path.stat().st_mtime_ns)):
            if (wanted if path.name not in own else used) <= self.budget:
                break
            used, wanted = used - path.stat().st_size, wanted - path.stat().st_size
            path.unlink()

    def share_room(self, processes: int) -> str:
        """Take this process's part of what is left; what the cache will hold, in words."""
        files = self._files()
        used, own = sum(path.stat().st_size for path in files), set(self.names)
        self.room = max(self.budget - used, 0) // processes
        whole = sum({name: size_of(sample, self.form) for name, sample in zip(self.names, self.samples, strict=True)}.values())
        there = sum(path.stat().st_size for path in files if path.name in own)
        share = min(1.0, (there + self.room * processes) / max(whole, 1))
        self.holds_all = share == 1
        return f"{gigabytes(whole)} of features, {gigabytes(there)} of them there; {gigabytes(self.budget)} has room for {share:.0%}"

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob("*.safetensors") if not path.name.startswith(("tail", "."))]

    def read(self, batch: Batch) -> Features:
        members = [index for row in batch.members for index in row]
        found = {index: self._load(index) for index in members}
        missing = lacking = [index for index, kept in found.items() if kept is None]
        if lacking and self.holds_all:
            missing = list(found)
        self.found, self.read_anew = self.found + len(found) - len(missing), self.read_anew + len(missing)
        if missing:
            features = self.live.read(collate(self.samples, [[index] for index in missing]).to(batch.tokens_BT.device))
            for row, index in enumerate(missing):
                alone = row_of(features, row, len(self.samples[index].tokens))
                found[index] = kept = self.form.encode(alone, self.live.backbone.readout)
                if index in lacking:
                    self._keep(index, kept)
        return self.form.decode(join([_there(found[index]) for index in members]), batch, self.taps)

    def _load(self, index: int) -> Encoded | None:
        """None for what is not there, cannot be read, or is another cache's: the backbone reads it anew."""
        try:
            with safe_open(self.folder / self.names[index], "pt") as file:
                names = file.keys() if file.metadata() == self.header else ()
                return {name: file.get_tensor(name) for name in names} or None
        except (OSError, SafetensorError):
            return None

    def _keep(self, index: int, kept: Encoded) -> None:
        size = size_of(self.samples[index], self.form) + 1024   # and a header
        if size <= self.room:
            self.room -= size
            try:
                save(kept, self.folder / self.names[index], self.header)
            except UserError as error:
                self.room = 0
                print(f"warning: {error}; nothing more is kept", file=sys.stderr)


def _there(kept: Encoded | None) -> Encoded:
    assert kept is not None
    return kept


def open_source(
    recipe: Recipe, drafters: Sequence[Drafter], tokenizer: PreTrainedTokenizerBase, samples: list[Sample], accelerator: Any
) -> tuple[FeatureSource, str | None]:
    """Where a run's features come from, read once for all its drafters, and what there is to say of it.

    Raises UserError for a cache that is not this run's.
    """
    backbone, cache, taps = drafters[0].backbone, recipe.cache, taps_of(drafters)
    if cache.dir is None:
        return Live(backbone, taps), None
    form, folder = form_of(cache, backbone, taps), Path(cache.dir)
    require_taps_alone(recipe, drafters, form)
    manifest = read_manifest(folder)
    if cache.mode == "full":
        expected = contents_of(samples, form, backbone, tokenizer, recipe.data)
        if manifest is None:
            raise UserError(f"no features in {folder}: found no manifest.json; run headstart cache with this recipe, or set cache.mode=lru")
        manifest.require(expected, "full")
        form = written_form(form, manifest)
        teacher = open_teacher(manifest, form, samples, Live(backbone, form.taps))
        return Stored(manifest, form, taps, teacher), f"{folder}: {len(manifest.shards)} shards, {cache.dtype}, not read anew"
    expected = contents(form, backbone)
    with accelerator.main_process_first():
        manifest = manifest or Manifest(folder, "lru", expected)
        manifest.require(expected, "lru")
        manifest.write()
        form = written_form(form, manifest)
        source = Recent(manifest, form, taps, samples, Live(backbone, form.taps), round(cache.disk_gb * 1e9))
        if accelerator.is_main_process:
            source.make_room()
    return source, f"{folder}: {source.share_room(accelerator.num_processes)}"


def require_taps_alone(recipe: Recipe, drafters: Sequence[Drafter], form: CacheFormat) -> None:
    """Raise UserError if likeliest tokens stand for a final hidden state that something else reads."""
    if not form.top:
        return
    for one, drafter in zip(recipe.per_drafter().values(), drafters, strict=True):
        who = "objective.terms.features learns" if one.objective.terms.get("features") else f"{one.drafter['kind']} reads"
        if one.objective.terms.get("features") or drafter.reads_hidden:
            raise UserError(f"cache.teacher=topk keeps no final hidden state, which {who}; set cache.teacher=hidden")
