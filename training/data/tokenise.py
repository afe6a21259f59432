"""Rows to samples: tokens with a loss mask, cut to length, in one process or in several of this machine.

Shape suffix: T positions.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from multiprocessing import current_process
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from headstart.chat.conversation import Chat, Continuation
from headstart.chat.template import ChatSettings, Template, TemplateRefusal
from headstart.support.errors import UserError, cause
from headstart.support.json_text import Row
from headstart.training.data.columns import BadRows, Column, find_column
from headstart.training.data.sample import IDS, Joined, Sample, read_tokens, whole
from headstart.training.recipe.recipe import Recipe
from headstart.training.recipe.sections import Data

T = TypeVar("T")
PR_SET_PDEATHSIG = 1
"""Of Linux: the signal that a process gets when its parent ends."""
PART, LEAST, MOST = 128, 1024, 16
"""Items of a part; items for which another process pays; processes that are started unless more are asked for."""


def in_parts(work: Callable[[range], T], items: int, processes: int | None = None) -> Iterator[T]:
    """Yield what ``work`` returns for one part of ``range(items)`` after another, in order.

    In this process where items are few, else in ``processes`` others, by default one for each CPU that is free. Those are forks, so
    ``work`` may be any function; it must neither use an accelerator nor return tensors. Raises what ``work`` raises, and UserError if a
    process is killed.
    """
    parts = [range(first, min(first + PART, items)) for first in range(0, items, PART)]
    count = min(free_cpus() if processes is None else processes, items // LEAST)
    if count < 2 or sys.platform != "linux" or current_process().daemon:  # elsewhere a fork is not safe, and a daemon may have none
        yield from map(work, parts)
        return
    settings: dict[str, Any] = {"batch_size": None, "collate_fn": _as_it_is, "worker_init_fn": _begin, "multiprocessing_context": "fork"}
    own = torch.Generator()  # the loader draws a seed, which would change the random numbers of the run
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*worker processes in total")
        loader = iter(DataLoader(_Parts(work, parts), num_workers=count, generator=own, **settings))
    try:
        for done in loader:
            if isinstance(done, UserError):
                raise done
            yield done
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise UserError(f"a process that tokenises has ended ({cause(error)}); give it more memory, or set data.processes=1") from None
    finally:
        del loader  # an error may hold this frame, and a later fork must not inherit the loader


def free_cpus() -> int:
    """The CPUs that this process may use, less those of the launch's other processes here, which wait meanwhile; at most `MOST`."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    waiting = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
    return max(1, min(usable - waiting, MOST))


class _Parts(Dataset[T | UserError]):
    def __init__(self, work: Callable[[range], T], parts: list[range]) -> None:
        self.work, self.parts = work, parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, number: int) -> T | UserError:
        try:
            return self.work(self.parts[number])
        except UserError as error:  # raised again in one line; the loader would add a traceback
            return error


def _as_it_is(item: T) -> T:
    return item


def _begin(_: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # else it would wait for ever for a killed parent to read its results
    gc.freeze()  # a collection would write to, and so copy, all memory that is shared with the first process


def now() -> str:
    """Return this instant in ISO 8601, in the local time that templates print."""
    return datetime.now().isoformat(timespec="seconds")


def begun_at(recipe: Recipe, kept: Sequence[str | None], instant: str) -> Recipe:
    """Return the recipe with ``data.template_time``: its own, else the first of those ``kept``, else ``instant``."""
    time = next((time for time in (recipe.data.template_time, *kept) if time), instant)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"template_time": time})})


def prints_date(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template may print a date."""
    settings = ChatSettings(recipe.data.chat_template)
    return bool(settings.template_of(tokenizer)) and Template(tokenizer, settings).prints_date


MIN_TOKENS = 4
"""Samples with fewer tokens are dropped; a sample's third token is the first that is drafted."""


@dataclass
class Stats:
    """Counts of rows, samples and tokens, and of what was dropped, truncated or split."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    label_tokens: int = 0
    rows_without_assistant: int = 0
    """Rows without an assistant turn after another message."""
    rows_refused: int = 0
    """Rows that the chat template fails to render."""
    refusal: str = ""
    """The template's error for the first refused row."""
    rows_bad: int = 0
    """Rows that cannot be read and are left out (``data.on_bad_row``)."""
    bad_row: str = ""
    """What is wrong with the first of them."""
    unread: str = ""
    rows_split: int = 0
    """Rows that became one sample per turn because the template rewrites earlier turns."""
    samples_truncated: int = 0
    tokens_truncated: int = 0
    """Tokens lost by truncation."""
    samples_split: int = 0
    """Samples cut into pieces under ``data.overlong=split``."""
    pieces: int = 0
    """Number of pieces."""
    samples_too_long: int = 0
    """Samples skipped under ``data.overlong=skip``."""
    samples_empty: int = 0
    """Samples dropped because they have too few tokens or no label tokens."""
    roles: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, left_out: Sequence[BadRows]) -> Stats:
        """The counts of what no samples are made of."""
        first, unread = next((one.first for one in left_out if one.first), ""), {one.unread: 0 for one in left_out if one.unread}
        return cls(rows_bad=sum(one.count for one in left_out), bad_row=first, unread=", ".join(unread))

    def __add__(self, other: Stats) -> Stats:
        """The counts of both; of texts the first."""
        pairs: dict[str, tuple[Any, Any]] = {key.name: (getattr(self, key.name), getattr(other, key.name)) for key in fields(Stats)}
        sums: dict[str, Any] = {name: (one or two) if isinstance(one, str) else one + two for name, (one, two) in pairs.items()}
        return Stats(**sums)

    def __str__(self) -> str:
        totals = [f"{self.rows:,} rows", f"{self.samples:,} samples", f"{self.tokens:,} tokens", f"{self.label_tokens:,} label tokens"]
        notes = {
            f"bad rows left out ({self.bad_row})": self.rows_bad,
            "rows without an assistant turn": self.rows_without_assistant,
            f"rows refused by the chat template ({self.refusal})": self.rows_refused,
            "rows split by turn": self.rows_split,
            f"samples truncated ({self.tokens_truncated:,} tokens cut off)": self.samples_truncated,
            f"samples cut into {self.pieces:,} pieces": self.samples_split,
            "samples too long": self.samples_too_long,
            "samples without label tokens": self.samples_empty,
        }
        return ", ".join(totals + [f"{count:,} {what}" for what, count in notes.items() if count])


def chat_settings(data: Data, ends: Sequence[int] = ()) -> ChatSettings:
    """Return how a recipe's conversations become tokens. ``ends``: the tokens at which the backbone's decoding stops."""
    return ChatSettings(data.chat_template, data.template_kwargs, tuple(ends), data.template_time)


Reader = Callable[[Row, str, Stats], list[Sample]]


def make_samples(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    *,
    source: str,
    ends: Sequence[int] = (),
    progress: bool = False,
) -> tuple[list[Sample], Stats]:
    """Make the samples of all rows, in order, with counts. Raises UserError if no label tokens remain."""
    read = reader_of(find_column(rows, data, source), tokenizer, data, ends)

    def make(part: range) -> tuple[Joined, Stats]:
        found, stats = _make(rows, part, read, data, source)
        return Joined.of(found), stats

    samples, stats = [], Stats()
    with tqdm(total=len(rows), desc="tokenising", unit="row", disable=not progress) as bar:
        for joined, counts in in_parts(make, len(rows), data.processes):
            samples += joined.samples()
            stats += counts
            bar.update(counts.rows)
    if not samples:
        raise _nothing_left(stats, source)
    return samples, stats


def _make(rows: Sequence[Row], part: range, read: Reader, data: Data, source: str) -> tuple[list[Sample], Stats]:
    """Make the samples of some of the rows, with counts."""
    samples, stats = [], Stats(rows=len(part))
    for number in part:
        where = f"{source}, row {number + 1}"
        try:
            row_samples = read(rows[number], where, stats)
        except TemplateRefusal as refusal:
            stats.rows_refused, stats.refusal = stats.rows_refused + 1, stats.refusal or str(refusal)
            continue
        stats.rows_split += len(row_samples) > 1
        samples += [fitting for sample in row_samples for fitting in _fit(sample, data, where, stats)]
    stats.samples, stats.tokens = len(samples), sum(len(sample.tokens) for sample in samples)
    stats.label_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    return samples, stats


def reader_of(column: Column, tokenizer: PreTrainedTokenizerBase, data: Data, ends: Sequence[int] = ()) -> Reader:
    """Return the function that makes a row's samples. Raises UserError for conversations without a chat template."""
    if column.kind == "tokens":
        return lambda row, where, stats: read_tokens(row, column.name, where, data.loss_on == "all")
    if column.kind == "text":
        return lambda row, where, stats: [whole(tokenizer(column.text(row, where), verbose=False)[IDS])]
    settings = chat_settings(data, ends)
    if column.kind == "pair" and (data.format == "text" or not settings.template_of(tokenizer)):
        return _plain_pairs(column, tokenizer, data, ends)
    chat = Chat(tokenizer, settings)

    def read(row: Row, where: str, stats: Stats) -> list[Sample]:
        messages, tools = column.messages(row, where)
        if data.loss_on == "all":
            return [whole(chat.tokens([chat.template.render(messages, tools).text])[0])]
        samples = chat.samples(messages, tools)
        stats.roles.update(message["role"] for message in messages)
        stats.rows_without_assistant += not samples
        return [Sample.of(tokens, labels) for tokens, labels in samples]

    return read


def _plain_pairs(column: Column, tokenizer: PreTrainedTokenizerBase, data: Data, ends: Sequence[int]) -> Reader:
    """Return the function that makes samples of prompts and answers without a chat template: the answer follows as it is, and ends."""
    continuation, end = Continuation(tokenizer), list(ends[:1]) or [token for token in [tokenizer.eos_token_id] if token is not None]

    def read(row: Row, where: str, stats: Stats) -> list[Sample]:
        prompt, answer = column.plain_pair(row, where)
        asked, said = tokenizer(prompt, verbose=False)[IDS], [*continuation.continued([answer])[0], *end]
        return [Sample.of([*asked, *said], [data.loss_on == "all"] * len(asked) + [True] * len(said))]

    return read


def _fit(sample: Sample, data: Data, where: str, stats: Stats) -> list[Sample]:
    """Apply ``data.overlong``: keep, truncate, split or drop the sample."""
    length, most = len(sample.tokens), data.max_length
    if length > most and data.overlong == "error":
        raise UserError(f"{where} has {length} tokens, over data.max_length={most}; raise that or set data.overlong=truncate")
    if length > most and data.overlong == "skip":
        stats.samples_too_long += 1
        return []
    count = -(-length // most) if data.splits_long else 1
    # Pieces have equal lengths, since the remainder after full pieces could be too short.
    pieces = list(zip(sample.tokens.tensor_split(count), sample.loss_mask.tensor_split(count), strict=True)) if length else []
    kept = [Sample(tokens[:most].clone(), loss_mask[:most].clone()) for tokens, loss_mask in pieces]
    kept = [piece for piece in kept if len(piece.tokens) >= MIN_TOKENS and piece.loss_mask.any()]
    stats.samples_empty += count - len(kept)
    if length > most and kept and count == 1:
        stats.samples_truncated, stats.tokens_truncated = stats.samples_truncated + 1, stats.tokens_truncated + length - most
    if count > 1:
        stats.samples_split, stats.pieces = stats.samples_split + 1, stats.pieces + count
    return kept


def _nothing_left(stats: Stats, source: str) -> UserError:
    if stats.rows_without_assistant == stats.rows:
        roles = ", ".join(stats.roles) or "none"
        return UserError(
            f"no assistant turn to train on in any of the {stats.rows} rows of {source} (roles found: {roles});"
            " data.loss_on=all trains on every token"
        )
    return UserError(f"no label tokens in {source}: {stats}")
