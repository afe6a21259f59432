"""Features that a run on a CPU computes in its first epoch and reads from disk in the next ones: there the backbone's forward pass takes
most of a step.

They are computed of each sample alone and stored as they are beside the run's checkpoints, and deleted at its end. A run that is resumed
after that computes the same again.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.support.files import value_hash
from headstart.support.text import gigabytes
from headstart.training.data.batches import Batch, BatchSampler
from headstart.training.features.codec import CacheFormat, Record, concatenate, with_teacher
from headstart.training.features.manifest import FORMAT, save_tensors
from headstart.training.features.source import FeatureSource, LiveFeatures
from headstart.training.features.writer import free_bytes
from headstart.training.recipe.recipe import Recipe

FOLDER = Path("state", "features")
"""Folder in ``save.dir``."""
SHARE_OF_DISK = 0.5
"""Of the free space that they may take."""


class FeaturesBetweenEpochs(LiveFeatures):
    """Runs the backbone on samples that it has not read yet."""

    def __init__(self, source: LiveFeatures, recipe: Recipe, restricted: bool, store: bool) -> None:
        """``restricted``: a drafter has a draft vocabulary. Without ``store`` nothing is kept, and the values are the same."""
        backbone = source.backbone
        super().__init__(backbone, source.taps)
        self.form, self.restricted, self.store = _form(backbone, source.taps), restricted, store
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
    on_policy = any(one.objective.on_policy for one in recipe.per_drafter().values())
    live = recipe.cache.dir is None and recipe.features.endpoint is None
    return recipe.cache.between_epochs and live and recipe.backbone.lora is None and not (on_policy or recipe.data.packing)


def bytes_kept(recipe: Recipe, backbone: Backbone, taps: tuple[int, ...], feed: BatchSampler) -> int:
    """Return the bytes of features that such a run keeps; 0 if it has no later epoch."""
    if feed.steps * recipe.train.batch_size <= feed.rows:
        return 0
    return sum(_form(backbone, taps).size(len(sample.tokens)) for sample in feed.samples)


def _form(backbone: Backbone, taps: tuple[int, ...]) -> CacheFormat:
    return CacheFormat(tuple(sorted(taps)), backbone.dim, backbone.dtype, "exact")
