"""Tokens that an earlier start, or another process of this one, has made: kept in the user's cache folder by all that they depend on.

A file holds the samples of a recipe, their counts and the result of the check. A file that is damaged, or another's, is made again; where
the folder cannot be written, tokens are not kept. The files used last remain, up to `MOST_BYTES` and `MOST_FILES` in all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2
import tokenizers
import torch
import transformers
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import headstart
from headstart.chat.template import Template
from headstart.support.errors import UserError
from headstart.support.files import atomic, cache_folder, value_hash
from headstart.training.data.batches import BatchSampler, Mix
from headstart.training.data.check import Check
from headstart.training.data.rows import fingerprint
from headstart.training.data.samples import Sample, Stats
from headstart.training.data.tokenise import chat_settings
from headstart.training.recipe.recipe import Data, Recipe, to_dict

FORMAT = 2
MOST_BYTES, MOST_FILES = 10 << 30, 256
DAY = 86400
CODE = ("chat", "support", "training/data")
"""Folders of the code that makes tokens."""
ABOUT = TypeAdapter(tuple[Stats, Mix | None, Check | None])
"""What a file holds beside the tokens."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Splits:
    """The samples of a recipe: trained on and held out, with counts and a check."""

    train: list[Sample]
    eval: list[Sample]
    stats: Stats
    """Counts for the training rows."""
    mix: Mix | None = None
    """How an epoch draws from several datasets; None: each sample once."""
    check: Check | None = None
    """Whether the tokens are those of decoding; None without conversations."""
    kept: bool = False
    """Whether an earlier start has made them."""

    def feed(self, recipe: Recipe, process: int = 0, processes: int = 1) -> BatchSampler:
        """Return the batches of a process of the recipe's run."""
        window = recipe.data.max_length if recipe.data.packing else None
        return BatchSampler(self.train, recipe.train, recipe.seed, process, processes, window, recipe.backbone.shard, self.mix)

    def __str__(self) -> str:
        return f"{self.stats}{'; tokens of an earlier start' if self.kept else ''}"


def tokens_file(data: Data, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> Path | None:
    """Return the file for a recipe's tokens; None if they depend on the clock, on images, or on what cannot be known. Raises UserError."""
    settings = chat_settings(data, ends)
    if data.images or (settings.time is None and settings.template_of(tokenizer) and Template(tokenizer, settings).prints_date):
        return None
    sources = [fingerprint(dataset.name, split=dataset.split, subset=dataset.subset) for dataset in (*data.per_dataset(), *data.held_out())]
    described = _described(tokenizer)
    if described is None or None in sources:
        return None
    keys = {key: value for key, value in to_dict(data).items() if key != "processes"}
    versions = [FORMAT, _code(), transformers.__version__, tokenizers.__version__, jinja2.__version__]
    parts = json.dumps([versions, sources, keys, described, list(ends)], sort_keys=True, default=str)
    return cache_folder() / "tokens" / f"{hashlib.sha256(parts.encode()).hexdigest()[:32]}.tokens"


def read_splits(file: Path) -> Splits | None:
    """Return the samples that a file holds; None if it is not there, damaged or something else."""
    try:
        with safe_open(file, "pt") as opened:
            found, about = (opened.metadata() or {})["about"].split(" ", 1)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not a mapping)
        if found != _sum(file, about, tensors):
            return None
        splits = Splits(_samples(tensors, "train"), _samples(tensors, "eval"), *ABOUT.validate_json(about), kept=True)
        os.utime(file)  # the one used last
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError):
        return None
    return splits


def keep_splits(file: Path, splits: Splits) -> None:
    """Write the samples to a file, in one step. Where that is not possible they are made again at the next start."""
    tensors = {f"{name}.{key}": tensor for name in ("train", "eval") for key, tensor in _joined(getattr(splits, name)).items()}
    about = ABOUT.dump_json((splits.stats, splits.mix, splits.check)).decode()
    try:
        file.parent.mkdir(0o700, parents=True, exist_ok=True)  # the rows may be nobody else's business
        with atomic(file) as temporary:
            save_file(tensors, temporary, {"about": f"{_sum(file, about, tensors)} {about}"})
        _remove_old(file)
    except (UserError, OSError, SafetensorError) as error:
        logger.info("tokens are not kept: %s", error)


def _joined(samples: Sequence[Sample]) -> dict[str, Tensor]:
    tokens = torch.cat([torch.empty(0, dtype=torch.int64), *(sample.tokens for sample in samples)])
    loss_mask = torch.cat([torch.empty(0, dtype=torch.bool), *(sample.loss_mask for sample in samples)])
    lengths = torch.tensor([len(sample.tokens) for sample in samples], dtype=torch.int64)
    return {"tokens": tokens.to(torch.int32), "loss_mask": loss_mask, "lengths": lengths}


def _samples(tensors: dict[str, Tensor], name: str) -> list[Sample]:
    """The samples again, which share their memory. Raises RuntimeError if the lengths are not those of the tokens and the mask."""
    tokens, loss_mask, lengths = (tensors[f"{name}.{key}"] for key in ("tokens", "loss_mask", "lengths"))
    parts = [joined.split(lengths.tolist()) if len(lengths) else () for joined in (tokens.long(), loss_mask)]
    return list(map(Sample, *parts))


def _sum(file: Path, about: str, tensors: dict[str, Tensor]) -> str:
    return value_hash([file.name, about, {name: [str(tensor.dtype), zlib.crc32(tensor.numpy().data)] for name, tensor in tensors.items()}])


def _remove_old(newest: Path) -> None:
    """Remove the files used longest ago, and what killed processes have left there a day ago."""
    used, now = 0, newest.stat().st_mtime
    with os.scandir(newest.parent) as entries:
        files = sorted(((entry.stat().st_mtime, entry.stat().st_size, Path(entry)) for entry in entries), reverse=True)
    for number, (time, size, file) in enumerate(files):
        used += size
        many = (used > MOST_BYTES or number >= MOST_FILES) and file != newest
        if time < now - DAY if file.suffix == ".tmp" else many:
            with suppress(FileNotFoundError):  # another process has removed it
                file.unlink()


def _described(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a hash of all that makes a tokenizer's tokens; None if it cannot be known."""
    try:
        state = tokenizer.backend_tokenizer.to_str().encode() if tokenizer.is_fast else pickle.dumps(tokenizer)
    except Exception as error:  # a tokenizer may be a program that comes with a model
        logger.info("tokens are not kept, as the tokenizer cannot be written down: %s", error)
        return None
    options = {key: value for key, value in tokenizer.init_kwargs.items() if key not in ("name_or_path", "tokenizer_file", "vocab_file")}
    own = [f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}", tokenizer.chat_template, tokenizer.special_tokens_map, options]
    return hashlib.sha256(state).hexdigest() + value_hash(own)


@cache
def _code() -> str:
    digest, root = hashlib.sha256(headstart.__version__.encode()), Path(headstart.__file__).parent
    for folder in CODE:
        for file in sorted((root / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()
