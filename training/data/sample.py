"""Samples, and rows that hold them as exact tokens: ``input_ids`` with ``loss_mask``, as speculators and SpecForge name them.

Shape suffix: T positions.

The column that a dataset is trained on, and what its values are: exact tokens, conversations or plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.support.chat.messages import Message, looks_like_turns, read_conversation, shortened
from headstart.support.errors import UserError
from headstart.support.json_text import Row
from headstart.training.recipe.sections import Data

IDS, MASK = "input_ids", "loss_mask"


@dataclass(frozen=True)
class Sample:
    tokens: Tensor
    """int64 [T]."""
    loss_mask: Tensor
    """bool [T]: True for label tokens."""

    @classmethod
    def of(cls, tokens: Sequence[int], labels: Sequence[bool]) -> Self:
        """Make one from lists."""
        return cls(torch.tensor(tokens, dtype=torch.int64), torch.tensor(labels, dtype=torch.bool))


@dataclass(frozen=True)
class Joined:
    """Samples one after another, in little memory: to send and to store."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    """Number of tokens of each sample."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Self:
        lengths = np.array([len(sample.tokens) for sample in samples], np.int64)
        if not samples:
            return cls(np.empty(0, np.int32), np.empty(0, np.bool_), lengths)
        tokens = torch.cat([sample.tokens for sample in samples]).to(torch.int32)
        return cls(tokens.numpy(), torch.cat([sample.loss_mask for sample in samples]).numpy(), lengths)

    def samples(self) -> list[Sample]:
        """Return the samples, which share their memory. Raises RuntimeError if the lengths are not those of the tokens and the mask."""
        lengths = self.lengths.tolist()
        if not lengths:
            return []
        pairs = zip(torch.from_numpy(self.tokens).long().split(lengths), torch.from_numpy(self.loss_mask).split(lengths), strict=True)
        return [Sample(tokens, loss_mask) for tokens, loss_mask in pairs]


def whole(tokens: Sequence[int]) -> Sample:
    """Make a sample all of whose tokens are labels."""
    return Sample.of(tokens, [True] * len(tokens))


def read_tokens(row: Row, column: str, where: str, everything: bool) -> list[Sample]:
    """Return a row's samples: one, or several if its columns are lists of lists. ``everything``: all tokens are labels, whatever the mask.

    Raises UserError, naming the row, for anything but token ids and a mask of as many zeros and ones.
    """
    ids, masks = row[column], row.get(MASK)
    if masks is None and not everything:
        raise UserError(f"{where} has {column} without {MASK}; add it (1 for tokens to learn), or set data.loss_on=all")
    nested = isinstance(ids, list) and ids and isinstance(ids[0], list)
    several = list(zip(ids, masks or [None] * len(ids), strict=False)) if nested else [(ids, masks)]
    if nested and masks is not None and len(masks) != len(ids):
        raise UserError(f"{where}: {column} has {len(ids)} samples and {MASK} {len(masks)}; give as many")
    return [whole(_ids(one, column, where)) if everything else _sample(one, mask, column, where) for one, mask in several]


def _sample(ids: Any, mask: Any, column: str, where: str) -> Sample:
    tokens = _ids(ids, column, where)
    if not isinstance(mask, list) or len(mask) != len(tokens) or not all(value in (0, 1) for value in mask):
        found = f"{len(mask)} values" if isinstance(mask, list) else type(mask).__name__
        raise UserError(f"{where}: {MASK} is a list of zeros and ones, one for each of the {len(tokens)} tokens of {column}; got {found}")
    return Sample.of(tokens, [bool(value) for value in mask])


def _ids(ids: Any, column: str, where: str) -> list[int]:
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise UserError(f"{where}: {column} is a list of token ids, whole numbers of at least 0; got {shortened(ids)}")
    return ids


TEXTS = ("messages", "conversations", "text")
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

    def require(self, row: Row, where: str) -> None:
        """Raise UserError if the row cannot be read."""
        if self.kind == "tokens":
            self.value(row, where)
            read_tokens(row, self.name, where, self.data.loss_on == "all")
        else:
            (self.messages if self.kind == "chat" else self.text)(row, where)


@dataclass(frozen=True)
class BadRows:
    """Rows that cannot be read and are left out."""

    count: int = 0
    first: str = ""
    """What is wrong with the first one."""


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
    sound, bad = [], BadRows()
    for number, row in enumerate(rows, 1):
        try:
            column.require(row, f"{source}, row {number}")
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
    return sound, bad


def _kind(name: str, rows: Sequence[Row], data: Data) -> Literal["tokens", "chat", "text"]:
    if data.format == "tokens" or (data.format == "auto" and name == IDS):
        return "tokens"
    if data.format != "auto" or name in ("messages", "conversations"):
        return "text" if data.format == "text" else "chat"
    values = [row[name] for row in rows if row.get(name) is not None]
    return "chat" if 2 * sum(map(looks_like_turns, values)) >= len(values) else "text"
