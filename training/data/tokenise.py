"""Rows to samples: tokens with a loss mask, cut to length, in one process or in several of this machine.

Shape suffix: T positions.
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from datetime import datetime
from multiprocessing import current_process, get_context
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from headstart.chat.conversation import Continuation, begin
from headstart.chat.images import ImageFile, ImageReader, make_chat, shown
from headstart.chat.messages import read_conversation
from headstart.chat.template import ChatSettings, Template, TemplateRefusal
from headstart.support.errors import UserError, cause
from headstart.support.json_text import Row
from headstart.training.data.samples import Column, NoAnswers, Sample, Stats, read_tokens, whole
from headstart.training.recipe.recipe import Recipe
from headstart.training.recipe.sections import Data

T = TypeVar("T")
PR_SET_PDEATHSIG = 1
"""Of Linux: the signal that a process gets when its parent ends."""
PART, LEAST, MOST = 128, 1024, 16
"""Items of a part; items for which another process pays; processes that are started unless more are asked for."""
_work: list[Callable[[range], Any]] = []
"""What this process does, if it is one of several."""
MIN_TOKENS = 4
"""Samples with fewer tokens are dropped; a sample's third token is the first that is drafted."""
Reader = Callable[[Row, str, Stats], list[Sample]]


def in_parts(work: Callable[[range], T], items: int, processes: int | None = None) -> Iterator[T]:
    """Yield what ``work`` returns for one part of ``range(items)`` after another, in order.

    In this process where items are few, else in ``processes`` others, by default one for each CPU that is free. Those are forks, so
    ``work`` must neither use an accelerator nor return tensors. Raises what ``work`` raises, and UserError if a process is killed.
    """
    parts = [range(first, min(first + PART, items)) for first in range(0, items, PART)]
    count = min(free_cpus() if processes is None else processes, items // LEAST)
    if count < 2 or sys.platform != "linux" or current_process().daemon:  # elsewhere a fork is not safe, and a daemon may have none
        yield from map(work, parts)
        return
    try:
        with ProcessPoolExecutor(count, get_context("fork"), _begin, (work,)) as pool:
            yield from pool.map(_do, parts)
    except BrokenProcessPool as error:
        raise UserError(f"a process that tokenises has ended ({cause(error)}); give it more memory, or set data.processes=1") from None


def free_cpus() -> int:
    """The CPUs that this process may use, less those of the launch's other processes here, which wait meanwhile; at most `MOST`."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    waiting = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
    return max(1, min(usable - waiting, MOST))


def _begin(work: Callable[[range], Any]) -> None:
    _work.append(work)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process says in one line that it was interrupted
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # else it would wait for ever for a killed parent to send it work
    gc.freeze()  # a collection would write to, and so copy, all memory that is shared with the first process


def _do(part: range) -> Any:
    return _work[0](part)


def now() -> str:
    """Return this instant in ISO 8601, in the local time that templates print."""
    return datetime.now().isoformat(timespec="seconds")


def begun_at(recipe: Recipe, kept: Sequence[str | None], instant: str) -> Recipe:
    """Return the recipe with ``data.template_time``: its own, else the first of those ``kept``, else ``instant``."""
    time = next((time for time in (recipe.data.template_time, *kept) if time), instant)
    return recipe.but({"data": {"template_time": time}})


def prints_date(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template may print a date."""
    settings = ChatSettings(recipe.data.chat_template)
    return bool(settings.template_of(tokenizer)) and Template(tokenizer, settings).prints_date


def chat_settings(data: Data, ends: Sequence[int] = ()) -> ChatSettings:
    """Return how a recipe's conversations become tokens. ``ends``: the tokens at which the backbone's decoding stops."""
    return ChatSettings(data.chat_template, data.template_kwargs, tuple(ends), data.template_time)


def make_samples(rows: Sequence[Row], read: Reader, data: Data, *, source: str, progress: bool = False) -> tuple[list[Sample], Stats]:
    """Make the samples of all rows, in order, with counts. ``read``: of `reader_of`. Raises UserError if no label tokens remain."""

    def make(part: range) -> tuple[list[tuple[NDArray[Any], NDArray[Any], tuple[ImageFile, ...]]], Stats]:
        found, stats = _make(rows, part, read, data, source)
        return [(sample.tokens.numpy(), sample.loss_mask.numpy(), sample.images) for sample in found], stats

    samples, stats = [], Stats()
    processes = 1 if data.images else data.processes  # an image processor may run threads, which no fork has
    with tqdm(total=len(rows), desc="tokenising", unit="row", disable=not progress) as bar:
        for found, counts in in_parts(make, len(rows), processes):
            samples += [Sample(torch.from_numpy(tokens), torch.from_numpy(mask), own) for tokens, mask, own in found]
            stats += counts
            bar.update(counts.rows)
    if not samples and stats.rows_without_assistant == stats.rows:
        roles = ", ".join(stats.roles) or "none"
        fault = f"no assistant turn to train on in any of the {stats.rows} rows of {source} (roles found: {roles})"
        raise NoAnswers(f"{fault}; `headstart regenerate` answers them, or data.loss_on=all trains on every token")
    if not samples:
        raise UserError(f"no label tokens in {source}: {stats}")
    return samples, stats


def _make(rows: Sequence[Row], part: range, read: Reader, data: Data, source: str) -> tuple[list[Sample], Stats]:
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


def reader_of(column: Column, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = (), images: ImageReader | None = None) -> Reader:
    """Return the function that makes a row's samples. Raises UserError for conversations without a chat template."""
    data = column.data
    if column.kind == "tokens":
        return lambda row, where, stats: _with_images(read_tokens(row, column.name, where, data.loss_on == "all"), row, images, where)
    if column.kind == "text":
        return lambda row, where, stats: [whole(begin(tokenizer, column.text(row, where)))]
    settings = chat_settings(data, ends)
    if column.kind == "pair" and (data.format == "text" or not settings.template_of(tokenizer)):
        return _plain_pairs(column, tokenizer, ends)
    chat = make_chat(tokenizer, settings, images)

    def read(row: Row, where: str, stats: Stats) -> list[Sample]:
        messages, tools = column.messages(row, where)
        if data.loss_on == "all":
            return [whole(chat.tokens([chat.template.render(messages, tools).text])[0])]
        said = chat.of(messages, where)
        samples = said.samples(messages, tools)
        stats.roles.update(message["role"] for message in messages)
        stats.rows_without_assistant += not samples
        return [Sample.of(tokens, labels, said.find(tokens)) for tokens, labels in samples]

    return read


def _with_images(samples: list[Sample], row: Row, images: ImageReader | None, where: str) -> list[Sample]:
    """Return samples of exact tokens with the images of the row's messages."""
    if images is None:
        return samples
    said = read_conversation(row, "messages", where, images=True)[0] if row.get("messages") is not None else []
    files = [file for _, file in images.read(said, where)]
    return [replace(sample, images=images.find(sample.tokens.tolist(), files, where)) for sample in samples]


def _plain_pairs(column: Column, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> Reader:
    """Return the function that makes samples of prompts and answers without a chat template: the answer follows as it is, and ends."""
    continuation, end = Continuation(tokenizer), list(ends[:1]) or [token for token in [tokenizer.eos_token_id] if token is not None]

    def read(row: Row, where: str, stats: Stats) -> list[Sample]:
        prompt, answer = column.plain_pair(row, where)
        asked, said = begin(tokenizer, prompt), [*continuation.continued([answer])[0], *end]
        return [Sample.of([*asked, *said], [column.data.loss_on == "all"] * len(asked) + [True] * len(said))]

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
    if cut := next((image for image in sample.images if image.place[0] < most < image.place[1]), None):
        raise UserError(f"{where}: data.max_length={most} cuts image {shown(cut.name)}; raise it, or set data.overlong=skip")
    kept = [replace(sample, tokens=tokens, loss_mask=loss_mask).cut(most) for tokens, loss_mask in pieces]
    kept = [piece for piece in kept if len(piece.tokens) >= MIN_TOKENS and piece.loss_mask.any()]
    stats.samples_empty += count - len(kept)
    if length > most and kept and count == 1:
        stats.samples_truncated, stats.tokens_truncated = stats.samples_truncated + 1, stats.tokens_truncated + length - most
    if count > 1:
        stats.samples_split, stats.pieces = stats.samples_split + 1, stats.pieces + count
    return kept
