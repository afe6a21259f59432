"""Features stored on disk, and the choice between stored and live ones.

A cache is written by ``headstart cache``. Beside its samples it holds, in ``supplement.safetensors``, what training without the backbone
needs: features of a few tokens for the start values of fresh heads, and features of held-out rows to evaluate on.

A run on a CPU, where the backbone's forward pass takes most of a step, computes features in its first epoch and reads them from disk in the
next ones. They are computed of each sample alone and stored as they are beside the run's checkpoints, and deleted at its end. A run that is
resumed after that computes the same again.

Shape suffixes: B batch, T positions.
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.head_only import HeadOnlyBackbone
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.support.files import value_hash
from headstart.support.text import gigabytes
from headstart.training.data.batches import Batch, BatchSampler, collate, samples_hash
from headstart.training.data.samples import Sample
from headstart.training.features.codec import CacheFormat, Record, concatenate, save_tensors, with_teacher, without_prefix
from headstart.training.features.manifest import FORMAT, MANIFEST, Manifest, ShardReader, contents_of, free_bytes, read_manifest
from headstart.training.features.served import ServedFeatures
from headstart.training.features.source import FeatureSource, LiveFeatures, LiveWithCache, taps_of
from headstart.training.recipe.recipe import Recipe

SUPPLEMENT = "supplement.safetensors"
EVALUATED_TOKENS = 16_384
"""Tokens of held-out rows that are kept at most."""
FOLDER = Path("state", "features")
"""Of features kept between epochs, in ``save.dir``."""
SHARE_OF_DISK = 0.5
"""Of the free space that features kept between epochs may take."""


def read_supplement(manifest: Manifest) -> tuple[Record, dict[str, str]] | None:
    """Read a cache's supplement, and its header; None if it has none."""
    path = manifest.folder / SUPPLEMENT
    if not path.exists():
        return None
    with safe_open(path, "pt") as file:
        header = file.metadata() or {}
    return (load_file(path), header) if header.get("cache") == manifest.id else None


def evaluated(samples: Sequence[Sample]) -> list[Sample]:
    """Return the held-out rows that are evaluated on stored features: the first ones, of `EVALUATED_TOKENS` at most, at least one."""
    ends = accumulate(len(sample.tokens) for sample in samples)
    return [sample for i, (sample, end) in enumerate(zip(samples, ends, strict=False)) if i == 0 or end <= EVALUATED_TOKENS]


class CachedFeatures(FeatureSource):
    """Reads samples from a complete feature cache; the backbone is not run."""

    def __init__(self, manifest: Manifest, form: CacheFormat, taps: tuple[int, ...], backbone: Backbone) -> None:
        self.reader, self.form, self.taps, self.backbone = ShardReader(manifest), form, taps, backbone
        self.without_last = False
        """Whether the features of a sample's last token are left out, which are none."""
        supplement = read_supplement(manifest)
        if supplement is None:
            raise UserError(f"{manifest.folder} lacks {SUPPLEMENT}; run headstart cache with this recipe to write it")
        self.supplement, header = supplement
        self.held_out, self.lacks_last = header["held_out"], header["lacks_last"] == "True"

    def read(self, batch: Batch) -> Features:
        features = self.form.decode(concatenate([self.reader.sample(i) for row in batch.members for i in row]), batch, self.taps)
        if not self.without_last:
            return features
        last_BT = batch.document_BT != torch.nn.functional.pad(batch.document_BT[:, 1:], (0, 1), value=-1)
        return replace(features, document_BT=batch.document_BT.masked_fill(last_BT, -1))

    def probe(self, tokens_1T: Tensor) -> Features:
        """Return the features of the tokens that were probed when the cache was written."""
        parts = {name: tensor[None].to(self.backbone.device) for name, tensor in without_prefix(self.supplement, "probe.").items()}
        taps = {int(tap): tensor for tap, tensor in without_prefix(parts, "tap.").items()}
        return Features(parts["tokens"], parts["hidden"], taps)

    def for_starts(self, taps: tuple[int, ...]) -> FeatureSource:
        source = copy(self)
        source.without_last = self.lacks_last
        return source

    def read_held_out(self, samples: Sequence[Sample]) -> Iterator[Features]:
        chosen = evaluated(samples)
        if samples_hash(chosen) != self.held_out:
            return
        for i in range(len(chosen)):
            record = without_prefix(self.supplement, f"held.{i}.")
            yield self.form.decode(record, collate(chosen, [[i]]).to(self.backbone.device), self.form.taps)


def open_source(
    recipe: Recipe, drafters: Sequence[Drafter], tokenizer: PreTrainedTokenizerBase, samples: list[Sample]
) -> tuple[FeatureSource, str | None]:
    """Return a run's feature source, and a summary of its cache, if any. Raises UserError if that is missing, incomplete or another."""
    backbone, cache, taps = drafters[0].backbone, recipe.cache, taps_of(drafters)
    if cache.dir is None:
        source = computed(recipe, backbone, taps)
        summary = None if recipe.features.endpoint is None else f"from {', '.join(recipe.features.endpoint)}"
    else:
        form, folder = CacheFormat.of(backbone, taps, cache.dtype), Path(cache.dir)
        manifest = read_manifest(folder)
        if manifest is None:
            raise UserError(f"no features in {folder}: found no {MANIFEST}; run headstart cache with this recipe, or set cache.dir=null")
        manifest.require(contents_of(samples, form, backbone, tokenizer, recipe.data))
        source = CachedFeatures(manifest, replace(form, taps=manifest.taps), taps, backbone)
        summary = f"{folder}: {len(manifest.shards)} shards, {cache.dtype}"
    if isinstance(backbone, HeadOnlyBackbone):  # which has no layers to compute the features of a few tokens with, for start values
        backbone.reader = lambda tokens_1T, taps: nearest_taps(source.probe(tokens_1T), taps)
    return source, summary


def computed(recipe: Recipe, backbone: Backbone, taps: tuple[int, ...]) -> FeatureSource:
    """Return the source that computes features, here or on servers. Raises UserError."""
    if recipe.features.endpoint is None:
        on_policy = any(single.objective.on_policy for single in recipe.per_drafter().values())
        return LiveWithCache(backbone, taps) if on_policy else LiveFeatures(backbone, taps)
    if not isinstance(backbone, HeadOnlyBackbone):
        raise UserError("drafter.layers prunes the backbone, whose layers are not here with features.endpoint; give drafter.path instead")
    return ServedFeatures(recipe.features, backbone, taps)


def nearest_taps(features: Features, taps: tuple[int, ...]) -> Features:
    """Return the features with these taps alone; one that is not there has the values of the nearest that is."""
    held = features.taps or {}
    return replace(features, taps={tap: held[min(held, key=lambda kept: abs(kept - tap))] for tap in taps} or None)


class FeaturesBetweenEpochs(LiveFeatures):
    """Runs the backbone on samples that it has not read yet."""

    def __init__(self, source: LiveFeatures, recipe: Recipe, restricted: bool, store: bool) -> None:
        """``restricted``: a drafter has a draft vocabulary. Without ``store`` nothing is kept, and the values are the same."""
        backbone = source.backbone
        super().__init__(backbone, source.taps)
        self.form, self.restricted, self.store = CacheFormat.of(backbone, source.taps), restricted, store
        depends = [FORMAT, backbone.contract(), str(backbone.dtype), backbone.adapter_digest, self.form.taps, restricted]
        self.folder = Path(recipe.save.dir) / FOLDER / value_hash(depends)[:16]

    def read(self, batch: Batch) -> Features:
        lengths = (batch.document_BT >= 0).sum(1).tolist()
        return self.form.decode(concatenate([self._record(batch, row, length) for row, length in enumerate(lengths)]), batch, self.taps)

    def _record(self, batch: Batch, row: int, length: int) -> Record:
        tokens_1T, labels_1T, document_1T = (x[row : row + 1, :length] for x in (batch.tokens_BT, batch.loss_mask_BT, batch.document_BT))
        images = batch.images[row : row + 1]
        digest = hashlib.sha256(tokens_1T.numpy().tobytes() + labels_1T.numpy().tobytes())
        digest.update("".join(image.digest for files in images for sample in files for image in sample).encode())
        path = self.folder / f"{digest.hexdigest()[:32]}.safetensors"
        try:
            return load_file(path)
        except (FileNotFoundError, SafetensorError):  # not read yet, or damaged
            pass
        alone = super().read(Batch(tokens_1T, labels_1T, document_1T, (batch.members[row],), images))
        record = self.form.encode(with_teacher(alone, self.backbone) if self.restricted else alone)
        if self.store:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_tensors(record, path, {})
        return record


def keep_between_epochs(
    recipe: Recipe, source: FeatureSource, drafters: Iterable[Drafter], feed: BatchSampler, processes: int
) -> tuple[FeatureSource, str | None]:
    """Return the source that a run reads from, and a line about what it keeps, if anything.

    Runs that have no later epoch yet read samples alone too, so that they can be made longer.
    """
    if not (isinstance(source, LiveFeatures) and source.backbone.device.type == "cpu" and processes == 1 and may_keep(recipe)):
        return source, None
    restricted, folder = any(drafter.vocabulary is not None for drafter in drafters), Path(recipe.save.dir) / FOLDER
    size, free = bytes_kept(recipe, source.backbone, source.taps, feed), free_bytes(folder)
    store = 0 < size < SHARE_OF_DISK * (free + sum(path.stat().st_size for path in folder.rglob("*.safetensors")))
    line = f"of the first epoch are kept for the next ones: {gigabytes(size)} in {folder}, deleted at the end"
    if size and not store:
        line = f"computed in each epoch: to keep them takes {gigabytes(size)} in {folder}, which has {gigabytes(free)}"
    return FeaturesBetweenEpochs(source, recipe, restricted, store), line if size else None


def discard_kept(recipe: Recipe) -> None:
    """Delete what a run has kept, at its end."""
    shutil.rmtree(Path(recipe.save.dir) / FOLDER, ignore_errors=True)


def may_keep(recipe: Recipe) -> bool:
    """Whether a run on a CPU whose backbone is frozen reads single samples, whose features may be kept."""
    on_policy = any(single.objective.on_policy for single in recipe.per_drafter().values())
    live = recipe.cache.dir is None and recipe.features.endpoint is None
    return recipe.cache.between_epochs and live and recipe.backbone.lora is None and not (on_policy or recipe.data.packing)


def bytes_kept(recipe: Recipe, backbone: Backbone, taps: tuple[int, ...], feed: BatchSampler) -> int:
    """Return the bytes of features that such a run keeps; 0 if it has no later epoch."""
    if feed.steps * recipe.train.batch_size <= feed.rows:
        return 0
    form = CacheFormat.of(backbone, taps)
    return sum(form.size(len(sample.tokens)) for sample in feed.samples)
