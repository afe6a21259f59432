"""Training data: convert rows to samples (tokens with a loss mask), and choose the prompts for evaluation.

Shape suffixes: T positions.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from headstart.support.chat.conversation import Chat
from headstart.support.chat.messages import prompt_length, read_messages
from headstart.support.chat.settings import ChatSettings
from headstart.support.chat.template import TemplateRefusal
from headstart.support.errors import UserError
from headstart.training.data.check import Check, Source, compare
from headstart.training.data.mix import Mix
from headstart.training.data.rows import Row, read_rows
from headstart.training.data.sample import IDS, Sample, read_tokens, whole
from headstart.training.recipe.recipe import Data, Eval

TEXTS = ("messages", "conversations", "text")
COLUMNS = (IDS, *TEXTS)
"""Columns that may hold a row's samples, in order of precedence."""
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

    def __add__(self, other: Stats) -> Stats:
        """The counts of both; the refusal is the first one."""
        sums = {key.name: getattr(self, key.name) + getattr(other, key.name) for key in fields(Stats) if key.name != "refusal"}
        return Stats(**sums, refusal=self.refusal or other.refusal)

    def __str__(self) -> str:
        totals = [f"{self.rows:,} rows", f"{self.samples:,} samples", f"{self.tokens:,} tokens", f"{self.label_tokens:,} label tokens"]
        notes = {
            "rows without an assistant turn": self.rows_without_assistant,
            f"rows refused by the chat template ({self.refusal})": self.rows_refused,
            "rows split by turn": self.rows_split,
            f"samples truncated ({self.tokens_truncated:,} tokens cut off)": self.samples_truncated,
            f"samples cut into {self.pieces:,} pieces": self.samples_split,
            "samples too long": self.samples_too_long,
            "samples without label tokens": self.samples_empty,
        }
        return ", ".join(totals + [f"{count:,} {what}" for what, count in notes.items() if count])


@dataclass(frozen=True)
class Splits:
    train: list[Sample]
    eval: list[Sample]
    stats: Stats
    """Counts for the training rows."""
    mix: Mix | None = None
    """How an epoch draws from several datasets; None: each sample once."""
    check: Check | None = None
    """Whether the tokens are those of decoding; None without conversations."""


def chat_settings(data: Data, ends: Sequence[int] = ()) -> ChatSettings:
    """Return how a recipe's conversations become tokens. ``ends``: the tokens at which the backbone's decoding stops."""
    return ChatSettings(data.chat_template, data.template_kwargs, tuple(ends), data.template_time)


def load_data(
    data: Data, tokenizer: PreTrainedTokenizerBase, context: int, *, ends: Sequence[int] = (), progress: bool = True
) -> Splits:
    """Read and tokenise a recipe's data for a backbone of ``context`` positions, whose decoding stops at ``ends``. Raises UserError."""
    if data.max_length > context:
        raise UserError(f"data.max_length={data.max_length} is longer than the backbone's context of {context}; lower it")
    datasets = data.per_dataset()
    rows = [read_rows(one.name, split=one.split, subset=one.subset, limit=one.limit) for one in datasets]
    held: list[list[Row]] = [[] for _ in datasets]
    if data.eval is None and data.eval_rows:
        rows, held = hold_out(rows, data.eval_rows, data.name)
    how: dict[str, Any] = {"ends": ends, "progress": progress}
    parts = [make_samples(part, tokenizer, one, source=one.name, **how) for part, one in zip(rows, datasets, strict=True)]
    sources = [(part, one, one.name) for part, one in zip(held, datasets, strict=True) if part]
    if data.eval is not None and data.eval_rows:
        sources = [(read_rows(data.eval, split=data.eval_split, subset=data.subset, limit=data.eval_rows), data, data.eval)]
    held_out: list[Sample] = []
    for part, settings, name in sources:
        uncut = settings.model_copy(update={"overlong": "truncate"}) if data.splits_long else settings   # later pieces are not prompts
        held_out += make_samples(part, tokenizer, uncut, source=name, ends=ends)[0]
    stats = sum((part_stats for _, part_stats in parts), Stats())
    check = sum((_check(part, tokenizer, one, ends) for part, one in zip(rows, datasets, strict=True)), Check(0, 0, stored=True))
    check.require()
    mix = _mix(data, [len(part) for part, _ in parts])
    return Splits([sample for samples, _ in parts for sample in samples], held_out, stats, mix, check if check.answers else None)


def _check(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, data: Data, ends: Sequence[int]) -> Check:
    """Compare some of a dataset's conversations with an independent side; no answers are compared where there are none."""
    column, settings = data_column(rows[0], data, data.name), chat_settings(data, ends)
    exact = column == IDS or data.format == "tokens"
    text = next((name for name in TEXTS[:2] if rows[0].get(name) is not None), None) if exact else column
    if text is None or isinstance(rows[0][text], str) or data.loss_on == "all" or not settings.template_of(tokenizer):
        return Check(0, 0, stored=True)
    return compare(rows, Source(data.name, text, "auto" if exact else data.format, exact), Chat(tokenizer, settings))


def _mix(data: Data, sizes: Sequence[int]) -> Mix | None:
    """Return the mix of datasets with these numbers of samples; None if they have no weights."""
    weights = tuple(dataset.weight for dataset in data.train if dataset.weight is not None)
    return Mix(tuple(dataset.path for dataset in data.train), tuple(sizes), weights) if len(weights) > 1 else None


def require_vocabulary(splits: Splits, vocab: int) -> None:
    """Raise UserError if a token is outside the backbone's vocabulary of size ``vocab``."""
    largest = max(int(sample.tokens.max()) for sample in [*splits.train, *splits.eval])
    if largest >= vocab:
        raise UserError(f"the tokenizer gives token {largest}, but the backbone's vocabulary has {vocab}; use the backbone's own")


def hold_out(datasets: Sequence[list[Row]], count: int, source: str) -> tuple[list[list[Row]], list[list[Row]]]:
    """Split the rows of each dataset into training and held-out rows.

    The ``count`` held-out rows are evenly spaced over all rows, since files are often sorted, and independent of the seed.
    """
    total = sum(map(len, datasets))
    if count >= total:
        raise UserError(f"data.eval_rows={count} would hold out all {total} rows of {source}; lower it, or set data.eval")
    held = {i * total // count for i in range(count)}
    kept: list[list[Row]] = []
    out: list[list[Row]] = []
    first = 0
    for rows in datasets:
        kept.append([row for i, row in enumerate(rows, first) if i not in held])
        out.append([row for i, row in enumerate(rows, first) if i in held])
        first += len(rows)
    if not all(kept):
        raise UserError(f"data.eval_rows={count} would hold out all rows of one of {source}; lower it, or set data.eval")
    return kept, out


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
    column = data_column(rows[0], data, source)
    read = _reader(column, rows[0][column], tokenizer, data, ends)
    samples, stats = [], Stats(rows=len(rows))
    for number, row in enumerate(tqdm(rows, desc="tokenising", unit="row", disable=not progress), 1):
        where = f"{source}, row {number}"
        if row.get(column) is None:
            raise UserError(f"{where} has no {column}; it has {', '.join(row)}")
        try:
            row_samples = read(row, column, where, stats)
        except TemplateRefusal as refusal:
            stats.rows_refused, stats.refusal = stats.rows_refused + 1, stats.refusal or str(refusal)
            continue
        stats.rows_split += len(row_samples) > 1
        samples += [fitting for sample in row_samples for fitting in _fit(sample, data, where, stats)]
    if not samples:
        raise _nothing_left(stats, source)
    stats.samples, stats.tokens = len(samples), sum(len(sample.tokens) for sample in samples)
    stats.label_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    return samples, stats


def data_column(row: Row, data: Data, source: str, columns: Sequence[str] = COLUMNS) -> str:
    """Return the column to train on, of ``columns`` if the recipe names none. Raises UserError if the row has none."""
    named = {"tokens": IDS}.get(data.format, data.format)
    candidates = (data.column,) if data.column else columns if data.format == "auto" else (named,)
    for column in candidates:
        if row.get(column) is not None:
            return column
    choose = "set data.column to one it has" if data.column else "name yours with data.column"
    wanted = " or ".join(name for name in candidates if name != IDS or len(candidates) == 1)
    raise UserError(f"{source} has the columns {', '.join(row) or '(none)'}, not {wanted}; {choose}")


Reader = Callable[[Row, str, str, Stats], list[Sample]]


def _reader(column: str, first: Any, tokenizer: PreTrainedTokenizerBase, data: Data, ends: Sequence[int]) -> Reader:
    """Return the function that makes a row's samples, chosen by the recipe's format, or by the column and its first value."""
    if data.format == "tokens" or (data.format == "auto" and column == IDS):
        return lambda row, column, where, stats: read_tokens(row, column, where, data.loss_on == "all")
    if data.format == "text" or (data.format == "auto" and isinstance(first, str)):
        return lambda row, column, where, stats: _text(row[column], tokenizer, where)
    chat = Chat(tokenizer, chat_settings(data, ends))

    def read(row: Row, column: str, where: str, stats: Stats) -> list[Sample]:
        messages, tools = read_messages(row[column], where, data.format), row.get("tools")
        if data.loss_on == "all":
            return [whole(chat.tokens([chat.template.render(messages, tools).text])[0])]
        samples = chat.samples(messages, tools)
        stats.roles.update(message["role"] for message in messages)
        stats.rows_without_assistant += not samples
        return [Sample.of(tokens, labels) for tokens, labels in samples]

    return read


def _text(text: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[Sample]:
    if not isinstance(text, str):
        raise UserError(f"{where}: plain text expected; got {type(text).__name__}")
    return [whole(tokenizer(text, verbose=False)[IDS])]


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


def prompts(samples: Sequence[Sample], settings: Eval, context: int) -> list[Tensor]:
    """Return up to ``settings.prompts`` prompts (int64 [T]) that leave room for the answer in the context.

    A prompt is a conversation up to its last answer, or the beginning of a plain text (`prompt_length`).
    """
    longest = context - settings.max_new_tokens
    fitting = [prompt for sample in samples if 0 < len(prompt := _prompt(sample, settings.prompt_tokens)) <= longest]
    if samples and not fitting:
        raise UserError(
            f"no held-out prompt leaves eval.max_new_tokens={settings.max_new_tokens} of the backbone's context of {context};"
            " lower eval.max_new_tokens, eval.prompt_tokens or data.max_length"
        )
    return fitting[: settings.prompts]


def _prompt(sample: Sample, prompt_tokens: int) -> Tensor:
    if sample.loss_mask.all():
        return sample.tokens[: prompt_length(len(sample.tokens), prompt_tokens)]
    labels = sample.loss_mask.nonzero().flatten().tolist()
    start = next(i for i in range(labels[-1], -1, -1) if i == 0 or not sample.loss_mask[i - 1])
    return sample.tokens[:start]
