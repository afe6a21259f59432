"""What a dataset's rows hold: the column that is trained on, or the two of a prompt and its answer, and whether the values are tokens,
turns or plain text; samples with their counts, and rows that hold them as exact tokens (``input_ids`` with one of `MASKS`).

Shape suffix: T positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Literal, Self

import torch
from torch import Tensor

from headstart.chat.images import ImageFile
from headstart.chat.messages import Message, looks_like_turns, read_conversation, unread
from headstart.chat.prompts import ANSWERS, DETAILS, PROMPTS, prompt_of, read_pair
from headstart.support.errors import UserError
from headstart.support.json_text import Row
from headstart.support.text import shortened
from headstart.training.recipe.sections import Data

IDS, MASK, LABELS, PADDING = "input_ids", "loss_mask", "labels", "attention_mask"
MASKS = (MASK, "completion_mask", "assistant_masks", LABELS)
"""Columns that say which tokens are learned: speculators' and SpecForge's, TRL's two, and labels as transformers' collators take them."""
IGNORED = -100
"""The label of a token that is not learned."""
CONVERSATIONS = ("messages", "conversations")
Kind = Literal["tokens", "chat", "pair", "text"]
BESIDE = ("tools", "system")
"""Columns that are read beside a conversation."""
NUMBER = "row"
"""The column in which `headstart regenerate` writes where a row is from."""


@dataclass(frozen=True)
class Sample:
    tokens: Tensor
    """int64 [T]."""
    loss_mask: Tensor
    """bool [T]: True for label tokens."""
    images: tuple[ImageFile, ...] = ()
    """Those whose tokens it has, which are no labels."""

    @classmethod
    def of(cls, tokens: Sequence[int], labels: Sequence[bool], images: tuple[ImageFile, ...] = ()) -> Self:
        """Make one from lists."""
        return cls(torch.tensor(tokens, dtype=torch.int64), torch.tensor(labels, dtype=torch.bool), images)

    def cut(self, length: int) -> Self:
        """The first ``length`` tokens, with the images before their end."""
        images = tuple(image for image in self.images if image.place[1] <= length)
        return type(self)(self.tokens[:length].clone(), self.loss_mask[:length].clone(), images)


@dataclass
class Stats:
    """Counts of rows, samples and tokens, and of what was left out, cut or split."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    label_tokens: int = 0
    rows_without_assistant: int = 0
    """Without an assistant turn after another message."""
    rows_refused: int = 0
    """Which the chat template fails to render."""
    refusal: str = ""
    """The template's error for the first of them."""
    rows_bad: int = 0
    """Which cannot be read and are left out (``data.on_bad_row``)."""
    bad_row: str = ""
    """What is wrong with the first of them."""
    rows_split: int = 0
    """Which became one sample per turn because the template rewrites earlier turns."""
    samples_truncated: int = 0
    tokens_truncated: int = 0
    samples_split: int = 0
    """Samples cut into pieces under ``data.overlong=split``."""
    pieces: int = 0
    samples_too_long: int = 0
    """Samples skipped under ``data.overlong=skip``."""
    samples_empty: int = 0
    """Samples dropped because they have too few tokens or no label tokens."""
    roles: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    """Fields of rows that nothing reads."""

    def __add__(self, other: Stats) -> Stats:
        """The counts of both; of texts the first."""
        sums: dict[str, Any] = {}
        for name, ours in vars(self).items():
            theirs = vars(other)[name]
            sums[name] = (ours or theirs) if isinstance(ours, str) else ours + theirs
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


def whole(tokens: Sequence[int]) -> Sample:
    """Make a sample all of whose tokens are labels."""
    return Sample.of(tokens, [True] * len(tokens))


def has_mask(row: Row) -> bool:
    """Whether a row says which of its exact tokens are learned."""
    return any(row.get(name) is not None for name in MASKS)


def read_tokens(row: Row, column: str, where: str, everything: bool) -> list[Sample]:
    """Return a row's samples: one, or several if its columns are lists of lists. ``everything``: all tokens are labels, whatever the masks.

    A token is a label if no mask leaves it out; padding, by an attention mask, is no token. Raises UserError, naming the row, for anything
    but token ids and masks of as many values.
    """
    if not has_mask(row) and not everything:
        raise UserError(f"{where} has {column} without {MASK}; add it (1 for tokens to learn), or set data.loss_on=all")
    ids, named = row[column], (PADDING,) if everything else (*MASKS, PADDING)
    masks = {name: row[name] for name in named if row.get(name) is not None}
    if not (isinstance(ids, list) and ids and isinstance(ids[0], list)):
        return [_sample(ids, masks, column, where)]
    for name, values in masks.items():
        if not isinstance(values, list) or len(values) != len(ids):
            found = len(values) if isinstance(values, list) else type(values).__name__
            raise UserError(f"{where}: {column} has {len(ids)} samples and {name} {found}; give as many")
    return [_sample(tokens, {name: values[i] for name, values in masks.items()}, column, where) for i, tokens in enumerate(ids)]


def _sample(ids: Any, masks: dict[str, Any], column: str, where: str) -> Sample:
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise UserError(f"{where}: {column} is a list of token ids, whole numbers of at least 0; got {shortened(ids)}")
    labels, real = [True] * len(ids), [True] * len(ids)
    for name, mask in masks.items():
        left_out = IGNORED if name == LABELS else 0
        allowed = [(left_out, token if name == LABELS else 1) for token in ids]
        listed = isinstance(mask, list) and len(mask) == len(ids)
        if not listed or any(value not in two for value, two in zip(mask, allowed, strict=True)):
            found = f"{len(mask)} values" if isinstance(mask, list) else type(mask).__name__
            values = f"the tokens of {column}, or {IGNORED} for those not to learn" if name == LABELS else "zeros and ones"
            raise UserError(f"{where}: {name} is a list of {values}, one for each of the {len(ids)} tokens of {column}; got {found}")
        counted = real if name == PADDING else labels
        counted[:] = [counts and value != left_out for counts, value in zip(counted, mask, strict=True)]
    return Sample.of(list(compress(ids, real)), list(compress(labels, real)))


@dataclass(frozen=True)
class Column:
    name: str
    kind: Kind
    data: Data
    answer: str = ""
    """Of a pair: the column that answers it; empty if the answers are yet to be written."""

    def value(self, row: Row, where: str) -> Any:
        """Return a row's value, of a pair its prompt. Raises UserError, which begins with ``where``, if it has none."""
        for name in (self.name, self.answer) if self.answer else (self.name,):
            if row.get(name) is None:
                raise UserError(f"{where} has no {name}; it has {', '.join(key for key in row if row[key] is not None) or 'nulls'}")
        return row[self.name]

    def messages(self, row: Row, where: str) -> tuple[list[Message], Any]:
        """Return the messages and tools of a conversation. Raises UserError."""
        value = self.value(row, where)
        if self.kind == "pair":
            return read_pair(row, self.name, self.answer, where, self.data.images)
        try:
            return read_conversation(row, self.name, where, self.data.format, self.data.images)
        except UserError as error:
            plain = isinstance(value, str) and self.data.format == "auto" and not looks_like_turns(value)
            raise UserError(f"{error}; data.format=text trains on plain text") if plain else error from None

    def plain_pair(self, row: Row, where: str) -> tuple[str, str]:
        """Return prompt and answer as plain texts. Raises UserError for turns."""
        self.value(row, where)
        pair = prompt_of(row, self.name, where), row[self.answer] if self.answer else ""
        if not all(isinstance(text, str) and not (self.data.format == "auto" and looks_like_turns(text)) for text in pair):
            raise UserError(f"{where}: {self.name} and {self.answer} are text without a chat template; set data.chat_template for turns")
        return pair

    def text(self, row: Row, where: str) -> str:
        """Return a plain text. Raises UserError for other values, and for a conversation among plain texts."""
        value = self.value(row, where)
        if not isinstance(value, str):
            raise UserError(f"{where}: plain text expected; got {type(value).__name__}")
        if self.data.format == "auto" and looks_like_turns(value):
            raise UserError(f"{where}: a conversation as JSON text among plain texts; data.format=text takes it as text")
        return value

    def require(self, row: Row, where: str) -> set[str]:
        """Return the names of the row's fields that nothing reads. Raises UserError if the row cannot be read."""
        columns = {name for name, value in row.items() if value is not None} - {self.name, NUMBER}
        if self.kind == "tokens":
            self.value(row, where)
            read_tokens(row, self.name, where, self.data.loss_on == "all")
            return columns - {*MASKS, PADDING, *CONVERSATIONS, "text", *BESIDE}
        if self.kind == "text":
            self.text(row, where)
            return columns
        read = {*BESIDE, *(["images", "image"] if self.data.images else [])}
        if self.kind == "pair":
            read |= {*([self.answer] if self.answer else ANSWERS), *(DETAILS if self.name == "instruction" else ())}
        return (columns - read).union(*(unread(message) for message in self.messages(row, where)[0]))


class NoAnswers(UserError):
    """The rows are prompts alone."""


def find_column(rows: Sequence[Row], data: Data, source: str, asked: bool = False) -> Column:
    """Return the column to train on, or two: if the recipe names none, the first of the usual ones that at least half of the rows have.

    Whether a column's values are conversations or plain text is what most of them are. ``asked``: to regenerate, by text, from prompts
    alone too. Raises UserError if no row has one.
    """
    counts = Counter(name for row in rows for name, value in row.items() if value is not None)
    if data.columns is not None:
        if data.columns.completion is None and not asked:
            raise NoAnswers("data.columns.completion is not set; name the column of the answers, or write them with headstart regenerate")
        found = [(data.columns.prompt, "" if asked else str(data.columns.completion))]
    elif data.column or data.format != "auto":
        found = [(data.column or {"tokens": IDS}.get(data.format, data.format), "")]
    else:
        found = _usual(counts, asked)
    shares = [min(counts[name], counts[answer] if answer else len(rows)) for name, answer in found]
    if not any(shares):
        own = "name yours with data.column, or two as data.columns={prompt: A, completion: B}"
        choose = "set data.column to one it has" if data.column else own
        wanted = " or ".join(" with ".join(filter(None, pair)) for pair in found if pair[0] != IDS or len(found) == 1)
        fault = f"{source} has the columns {', '.join(rows[0]) or '(none)'}, not {wanted}"
        if not asked and any(counts[name] for name in PROMPTS):
            raise NoAnswers(f"{fault}; `headstart regenerate` answers prompts alone; else {choose}")
        raise UserError(f"{fault}; {choose}")
    name, answer = next(pair for pair, count in zip(found, shares, strict=True) if 2 * count >= max(shares))
    paired = data.columns is not None or (data.column is None and name in PROMPTS)
    return Column(name, "pair" if paired else _kind(name, rows, data), data, "" if asked else answer)


def _usual(counts: Mapping[str, int], asked: bool) -> list[tuple[str, str]]:
    """Return the columns that are looked for without a recipe's word, each with the one that answers it, in order of precedence."""
    prompt, answer = (max(names, key=lambda name: counts[name]) for names in (PROMPTS, ANSWERS))
    pairs = [(prompt, answer), ("text", ""), *([(prompt, "")] if asked else [])]
    return [*([] if asked else [(IDS, "")]), *((name, "") for name in CONVERSATIONS), *pairs]


def _kind(name: str, rows: Sequence[Row], data: Data) -> Kind:
    if data.format == "tokens" or (data.format == "auto" and name == IDS):
        return "tokens"
    if data.format != "auto" or name in CONVERSATIONS:
        return "text" if data.format == "text" else "chat"
    values = [row[name] for row in rows if row.get(name) is not None]
    return "chat" if 2 * sum(map(looks_like_turns, values)) >= len(values) else "text"
