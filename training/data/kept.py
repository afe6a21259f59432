"""The samples of a recipe: checked, and kept in the user's cache folder by all that they depend on, for later starts and other processes.

The check before training: are the tokens trained on those of decoding? For some conversations of the data, each prompt is compared with the
one that transformers' own ``apply_chat_template`` gives, each answer with the token ids that are kept beside the text (`headstart
regenerate` writes them), else with what its text gives on a round trip through the tokenizer.

A file holds the samples of a recipe, their counts and the result of the check. A file that is damaged, or another's, is made again; where
the folder cannot be written, tokens are not kept. The files used last remain, up to `MOST_BYTES` and `MOST_FILES` in all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

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
from headstart.chat.conversation import Chat
from headstart.chat.messages import Message, is_learned
from headstart.chat.template import Template, TemplateRefusal
from headstart.inference.engine.processing import common_prefix
from headstart.support.errors import UserError
from headstart.support.files import atomic, cache_folder, value_hash
from headstart.support.json_text import Row
from headstart.training.data.batches import BatchSampler, Mix
from headstart.training.data.rows import fingerprint
from headstart.training.data.samples import IDS, Column, Sample, Stats, has_mask, read_tokens
from headstart.training.data.tokenise import chat_settings
from headstart.training.recipe.recipe import Data, Recipe, to_dict

ROWS = 100
"""Number of rows that are compared, evenly spaced."""
STORED, TEXT = 0.99, 0.95
"""Least share of answers that must be alike, where their token ids are kept and where not."""
OPENED = 16
"""Tokens at the end of a prompt that an answer's text may repeat, as an opened thought."""
THINK = re.compile(r"</?think>")
"""Templates write blanks of their own around the tags of a thought."""
AROUND = 4
"""Tokens shown before and after a difference."""
Samples = Sequence[tuple[list[int], list[bool]]]
"""Tokens, and which of them are learned."""


@dataclass(frozen=True)
class Check:
    answers: int
    same: int
    stored: bool = False
    """Whether token ids are kept beside all of the text."""
    first: str | None = None
    """The first difference."""
    warning: str = ""
    """What is amiss with the ends of answers (`Ending.warning`)."""

    def __add__(self, other: Check) -> Check:
        stored = (self.stored or not self.answers) and (other.stored or not other.answers)
        first, warning = self.first or other.first, self.warning or other.warning
        return Check(self.answers + other.answers, self.same + other.same, stored, first, warning)

    def __str__(self) -> str:
        return f"{self.same:,} of {self.answers:,} answers are tokenised as they are written"

    def report(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {
            "said": str(self), "answers": self.answers, "as_written": self.same, "token_ids_kept": self.stored,
            "warning": self.warning or None,
        }  # fmt: skip

    def require(self) -> None:
        """Raise UserError, naming the first difference, if too few answers are alike."""
        if self.first is not None and self.same < (STORED if self.stored else TEXT) * self.answers:
            raise UserError(f"only {self} (of some of the rows). {self.first}")


def compare(rows: Sequence[Row], name: str, column: Column, chat: Chat, exact: bool) -> Check:
    """Compare some rows of the dataset ``name``. ``exact``: their exact tokens are what is trained on, and ``column`` is their text."""
    check, count = Check(0, 0, stored=True), min(ROWS, len(rows))
    for number in (i * len(rows) // count for i in range(count)):
        if rows[number].get(column.name) is not None:
            with suppress(TemplateRefusal):  # counted where samples are made
                check += _compare(rows[number], f"{name}, row {number + 1}", column, chat, exact)
    return replace(check, warning=chat.ending.warning if check.answers else "")


def _compare(row: Row, where: str, column: Column, chat: Chat, exact: bool) -> Check:
    messages, tools = column.messages(row, where)
    chat = chat.of(messages, where)
    stored = read_tokens(row, IDS, where, False) if row.get(IDS) is not None and has_mask(row) else []
    written = [run for sample in stored for run in _runs(sample)]
    samples = [] if exact else chat.samples(messages, tools)
    turns, differences = [i for i, message in enumerate(messages) if i > 0 and is_learned(message)], []
    for number, i in enumerate(turns):
        asked, answer = written[number] if number < len(written) else ([], None)
        if exact:
            differences.append(_said(f"{where}, turn {i}", asked, answer or [], messages[i], chat))
        else:
            differences.append(_turn(f"{where}, turn {i}", samples, messages[: i + 1], tools, chat, answer))
    return Check(len(turns), differences.count(None), bool(stored), next((fault for fault in differences if fault is not None), None))


def _turn(where: str, samples: Samples, messages: list[Message], tools: Any, chat: Chat, written: list[int] | None) -> str | None:
    """Compare the last message as it is in the samples of its row; ``written``: its stored answer, if any."""
    asked = chat.applied(messages[:-1], tools)
    length = len(asked)
    tokens, labels = max(samples, key=lambda sample: common_prefix(sample[0], asked))
    if tokens[:length] != asked:
        return _difference(f"{where}, its prompt", tokens[:length], asked, "the prompt is not what apply_chat_template gives: report this")
    rest, labels = tokens[length:], labels[length:]
    answer = rest[: chat.ending.length(rest) or (labels.index(False) if False in labels else None)]
    if written is not None:
        cause = "the text does not say all that was written; train on the tokens (data.format=tokens)"
        return None if answer == written else _difference(where, answer, written, cause)
    again = chat.continued([chat.text(answer)])[0]
    difference = None if again == answer else _difference(where, answer, again, "the tokenizer does not give a text back as it was")
    return _said(where, asked, answer, messages[-1], chat) or difference


def _said(where: str, asked: list[int], answer: list[int], message: Message, chat: Chat) -> str | None:
    """Compare what an answer's tokens say with its text, which may begin with what the prompt's end has opened."""
    content, text = message.get("content"), chat.text([*asked[-OPENED:], *answer])
    wanted = content.strip() if isinstance(content, str) else ""
    if wanted in text or all(part.strip() in text for part in THINK.split(wanted)):
        return None
    cause = "the tokenizer or the chat template changes the text, or the token ids are another tokenizer's"
    return _difference(where, answer, chat.continued([wanted])[0], cause)


def _difference(where: str, trained: list[int], written: list[int], cause: str) -> str:
    """Say where two answers differ first, and why."""
    place = common_prefix(trained, written)
    first, end = max(place - AROUND, 0), place + AROUND
    found = f"{where}: from token {first} of the answer on, trained on {trained[first:end]}, written {written[first:end]}"
    return f"{found}; likely cause: {cause}"


def _runs(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """Return the runs of label tokens, each with the tokens before it."""
    tokens, mask = sample.tokens.tolist(), sample.loss_mask.tolist()
    runs = [[i for i, _ in run] for label, run in groupby(enumerate(mask), key=itemgetter(1)) if label]
    return [(tokens[: run[0]], tokens[run[0] : run[-1] + 1]) for run in runs]


# Kept tokens.

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
