"""The column that a dataset is trained on, and what its values are: exact tokens, conversations or plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headstart.support.chat.messages import Message, looks_like_turns, read_conversation, unread
from headstart.support.errors import UserError, notice
from headstart.support.json_text import Row
from headstart.training.data.sample import IDS, MASKS, PADDING, read_tokens
from headstart.training.recipe.sections import Data

TEXTS = ("messages", "conversations", "text")
BESIDE = ("tools", "system")
"""Columns that are read beside a conversation."""
NUMBER = "row"
"""The column in which `headstart regenerate` writes where a row is from."""


COLUMNS = (IDS, *TEXTS)
"""Columns that may hold a row's samples, in order of precedence."""


LEAST, FEW = 0.01, 20
"""Share of bad rows from which on they end the run, whatever ``data.on_bad_row`` is; a single one among at least so many rows does not."""


@dataclass(frozen=True)
class Column:
    name: str
    kind: Literal["tokens", "chat", "text"]
    data: Data

    def value(self, row: Row, where: str) -> Any:
        """Return a row's value. Raises UserError, which begins with ``where``, if it has none."""
        if row.get(self.name) is None:
            raise UserError(f"{where} has no {self.name}; it has {', '.join(row)}")
        return row[self.name]

    def messages(self, row: Row, where: str) -> tuple[list[Message], Any]:
        """Return the messages and tools of a conversation. Raises UserError."""
        value = self.value(row, where)
        try:
            return read_conversation(row, self.name, where, self.data.format)
        except UserError as error:
            plain = isinstance(value, str) and self.data.format == "auto" and not looks_like_turns(value)
            raise UserError(f"{error}; data.format=text trains on plain text") if plain else error from None

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
            return columns - {*MASKS, PADDING, *TEXTS, *BESIDE}
        if self.kind == "text":
            self.text(row, where)
            return columns
        said = self.messages(row, where)[0]
        return (columns - {*BESIDE}).union(*(unread(message) for message in said))


@dataclass(frozen=True)
class BadRows:
    """Rows that cannot be read and are left out, and fields of the others that nothing reads."""

    count: int = 0
    first: str = ""
    """What is wrong with the first one."""
    unread: str = ""
    """The names of the fields."""


def find_column(rows: Sequence[Row], data: Data, source: str, columns: Sequence[str] = COLUMNS) -> Column:
    """Return the column to train on, of ``columns`` if the recipe names none: the first that at least half of the rows have.

    Whether its values are conversations or plain text is what most of them are. Raises UserError if no row has one.
    """
    named = {"tokens": IDS}.get(data.format, data.format)
    candidates = (data.column,) if data.column else columns if data.format == "auto" else (named,)
    counts = {name: sum(row.get(name) is not None for row in rows) for name in candidates}
    most = max(counts.values())
    if not most:
        choose = "set data.column to one it has" if data.column else "name yours with data.column"
        wanted = " or ".join(name for name in candidates if name != IDS or len(candidates) == 1)
        raise UserError(f"{source} has the columns {', '.join(rows[0]) or '(none)'}, not {wanted}; {choose}")
    name = next(name for name, count in counts.items() if 2 * count >= most)
    return Column(name, _kind(name, rows, data), data)


def sound_rows(rows: list[Row], data: Data, source: str, columns: Sequence[str] = COLUMNS) -> tuple[list[Row], BadRows]:
    """Return the rows that can be read, and what is left out.

    Raises UserError at the first bad row under ``data.on_bad_row=error``, or if 1 % of the rows or more are bad, and more than one of
    at least 20.
    """
    column = find_column(rows, data, source, columns)
    sound, bad, fields = [], BadRows(), set[str]()
    for number, row in enumerate(rows, 1):
        try:
            fields |= column.require(row, f"{source}, row {number}")
        except UserError as error:
            if data.on_bad_row == "error":
                raise
            bad = BadRows(bad.count + 1, bad.first or str(error))
        else:
            sound.append(row)
    if bad.count >= LEAST * len(rows) and bad.count > (len(rows) >= FEW):
        below = "below 1 % they are skipped" if len(rows) >= FEW else f"one of at least {FEW} is skipped"
        many = f" ({bad.count:,} of {len(rows):,} rows are bad; {below})" if len(rows) > 1 else ""
        raise UserError(f"{bad.first}{many}")
    return sound, replace(bad, unread=", ".join(sorted(fields)))


def say_unread(unread: str) -> None:
    """Name fields that nothing reads, if any: other trainers may obey one of them."""
    if unread:
        notice(f"rows have fields that are not read: {unread}")


def _kind(name: str, rows: Sequence[Row], data: Data) -> Literal["tokens", "chat", "text"]:
    if data.format == "tokens" or (data.format == "auto" and name == IDS):
        return "tokens"
    if data.format != "auto" or name in ("messages", "conversations"):
        return "text" if data.format == "text" else "chat"
    values = [row[name] for row in rows if row.get(name) is not None]
    return "chat" if 2 * sum(map(looks_like_turns, values)) >= len(values) else "text"
