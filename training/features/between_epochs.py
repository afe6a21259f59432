"""Features that a run on a CPU computes in its first epoch and reads from disk in the next ones: there the backbone's forward pass takes
most of a step.

They are computed of each sample alone and stored as in a feature cache, beside the run's checkpoints, and deleted at the run's end. A run
that is resumed after that computes the same again.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from safetensors.torch import load_file

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.support.files import value_hash
from headstart.support.text import gigabytes
from headstart.training.data.batch_sampler import BatchSampler
from headstart.training.data.packing import Batch
from headstart.training.features.codec import CacheFormat, Record, concatenate, with_teacher
from headstart.training.features.manifest import FORMAT, format_of, save_tensors
from headstart.training.features.source import FeatureSource, LiveFeatures
from headstart.training.features.writer import SPARE_BYTES, free_bytes
from headstart.training.recipe.recipe import Recipe

FOLDER = Path("state", "features")
"""Folder in ``save.dir``."""


class FeaturesBetweenEpochs(LiveFeatures):
    """Runs the backbone on samples that it has not read yet."""

    def __init__(self, backbone: Backbone, form: CacheFormat, taps: tuple[int, ...], folder: Path) -> None:
        super().__init__(backbone, taps)
        depends = [FORMAT, backbone.contract(), backbone.adapter_digest, form.taps, form.dtype]
        self.form, self.root, self.folder = form, folder, folder / value_hash(depends)[:16]

    def read(self, batch: Batch) -> Features:
        lengths = (batch.document_BT >= 0).sum(1).tolist()
        return self.form.decode(concatenate([self._record(batch, row, length) for row, length in enumerate(lengths)]), batch, self.taps)

    def _record(self, batch: Batch, row: int, length: int) -> Record:
        tokens_1T, *others = (part[row : row + 1, :length] for part in (batch.tokens_BT, batch.loss_mask_BT, batch.document_BT))
        digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in (tokens_1T, others[0]))).hexdigest()  # with its labels
        path = self.folder / f"{digest[:32]}.safetensors"
        if path.exists():
            return load_file(path)
        alone = super().read(Batch(tokens_1T, *others, (batch.members[row],)))
        record = self.form.encode(with_teacher(alone, self.backbone))
        self.folder.mkdir(parents=True, exist_ok=True)
        save_tensors(record, path, {})
        return record

    def discard(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def keep_between_epochs(recipe: Recipe, source: FeatureSource, feed: BatchSampler, processes: int) -> tuple[FeatureSource, str | None]:
    """Return the source that a run reads from, and a line about what it keeps, if anything."""
    if type(source) is not LiveFeatures or source.backbone.device.type != "cpu" or processes > 1:
        return source, None
    if not (size := bytes_kept(recipe, source.backbone, source.taps, feed)):
        return source, None
    folder = Path(recipe.save.dir) / FOLDER
    if (free := free_bytes(folder)) < size + SPARE_BYTES:
        return source, f"computed in each epoch: to keep them takes {gigabytes(size)} in {folder}, which has {gigabytes(free)}"
    kept = FeaturesBetweenEpochs(source.backbone, format_of(recipe.cache, source.backbone, source.taps), source.taps, folder)
    return kept, f"of the first epoch are kept for the next ones: {gigabytes(size)} in {folder}, deleted at the end"


def bytes_kept(recipe: Recipe, backbone: Backbone, taps: tuple[int, ...], feed: BatchSampler) -> int:
    """Return the bytes of features that one process on a CPU keeps for later epochs; 0 if it has none, or keeps none."""
    changing = backbone.trainable or any(one.objective.on_policy for one in recipe.per_drafter().values())
    again = feed.steps * recipe.train.batch_size > feed.rows
    if not (again and recipe.cache.between_epochs) or changing or recipe.data.packing:
        return 0
    form = format_of(recipe.cache, backbone, taps)
    return sum(form.size(len(sample.tokens)) for sample in feed.samples)
