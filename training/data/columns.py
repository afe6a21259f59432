"""The column that a dataset is trained on, or the two of a prompt and its answer, and what the values are: tokens, turns or plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headstart.chat.messages import (
    ANSWERS,
    DETAILS,
    PROMPTS,
    Message,
    looks_like_turns,
    prompt_of,
    read_conversation,
    read_pair,
    unread,
)
from headstart.support.errors import UserError, notice
from headstart.support.json_text import Row
from headstart.training.data.sample import IDS, MASKS, PADDING, Stats, read_tokens
from headstart.training.recipe.sections import Data

CONVERSATIONS = ("messages", "conversations")
Kind = Literal["tokens", "chat", "pair", "text"]
BESIDE = ("tools", "system")
"""Columns that are read beside a conversation."""
NUMBER = "row"
"""The column in which `headstart regenerate` writes where a row is from."""

LEAST, FEW = 0.01, 20
"""Share of bad rows from which on they end the run, whatever ``data.on_bad_row`` is; a single one among at least so many rows does not."""


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
                raise UserError(f"{where} has no {name}; it has {', '.join(row)}")
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
        pair = prompt_of(row, self.name), row[self.answer] if self.answer else ""
        if not all(isinstance(text, str) for text in pair):
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
        said = self.messages(row, where)[0]
        about = (
            () if self.kind != "pair" else (*((self.answer,) if self.answer else ANSWERS), *(DETAILS if self.name == "instruction" else ()))
        )
        return (columns - {*BESIDE, *about, *(("images",) if self.data.images else ())}).union(*(unread(message) for message in said))


def find_column(rows: Sequence[Row], data: Data, source: str, asked: bool = False) -> Column:
    """Return the column to train on, or two: if the recipe names none, the first of the usual ones that at least half of the rows have.

    Whether a column's values are conversations or plain text is what most of them are. ``asked``: to regenerate, by text, from prompts
    alone too. Raises UserError if no row has one.
    """
    counts = Counter(name for row in rows for name, value in row.items() if value is not None)
    if data.columns is not None:
        if data.columns.completion is None and not asked:
            raise UserError("data.columns.completion is not set; name the column of the answers, or write them with headstart regenerate")
        found = [(data.columns.prompt, "" if asked else str(data.columns.completion))]
    elif data.column or data.format != "auto":
        found = [(data.column or {"tokens": IDS}.get(data.format, data.format), "")]
    else:
        found = _usual(counts, asked)
    shares = [min(counts[name], counts[answer] if answer else len(rows)) for name, answer in found]
    if not any(shares):
        choose = (
            "set data.column to one it has"
            if data.column
            else "name yours with data.column, or two as data.columns={prompt: A, completion: B}"
        )
        wanted = " or ".join(" with ".join(filter(None, pair)) for pair in found if pair[0] != IDS or len(found) == 1)
        raise UserError(f"{source} has the columns {', '.join(rows[0]) or '(none)'}, not {wanted}; {choose}")
    name, answer = next(pair for pair, count in zip(found, shares, strict=True) if 2 * count >= max(shares))
    paired = data.columns is not None or (data.column is None and name in PROMPTS)
    return Column(name, "pair" if paired else _kind(name, rows, data), data, "" if asked else answer)


def sound_rows(rows: list[Row], data: Data, source: str, asked: bool = False) -> tuple[list[Row], Stats]:
    """Return the rows that can be read, with the counts of bad rows and unread fields.

    Raises UserError at the first bad row under ``data.on_bad_row=error``, or if 1 % of the rows or more are bad, and more than one of
    at least 20.
    """
    column, sound, stats = find_column(rows, data, source, asked), [], Stats()
    for number, row in enumerate(rows, 1):
        try:
            stats.unread.update(column.require(row, f"{source}, row {number}"))
        except UserError as error:
            if data.on_bad_row == "error":
                raise
            stats.rows_bad, stats.bad_row = stats.rows_bad + 1, stats.bad_row or str(error)
        else:
            sound.append(row)
    if stats.rows_bad >= LEAST * len(rows) and stats.rows_bad > (len(rows) >= FEW):
        below = "below 1 % they are skipped" if len(rows) >= FEW else f"one of at least {FEW} is skipped"
        many = f" ({stats.rows_bad:,} of {len(rows):,} rows are bad; {below})" if len(rows) > 1 else ""
        raise UserError(f"{stats.bad_row}{many}")
    return sound, stats


def say_unread(stats: Stats) -> None:
    """Name fields that nothing reads, if any: other trainers may obey one of them."""
    if stats.unread:
        notice(f"rows have fields that are not read: {', '.join(sorted(stats.unread))}")


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
