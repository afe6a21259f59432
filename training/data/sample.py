"""Samples with their counts, and rows that hold them as exact tokens: ``input_ids`` with ``loss_mask`` or another of `MASKS`.

Shape suffix: T positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Self

import torch
from torch import Tensor

from headstart.chat.images import ImageFile
from headstart.chat.messages import shortened
from headstart.support.errors import UserError
from headstart.support.json_text import Row

IDS, MASK, LABELS, PADDING = "input_ids", "loss_mask", "labels", "attention_mask"
MASKS = (MASK, "completion_mask", "assistant_masks", LABELS)
"""Columns that say which tokens are learned: speculators' and SpecForge's, TRL's two, and labels as transformers' collators take them."""
IGNORED = -100
"""The label of a token that is not learned."""


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
    return [_sample(one, {name: values[i] for name, values in masks.items()}, column, where) for i, one in enumerate(ids)]


def _sample(ids: Any, masks: dict[str, Any], column: str, where: str) -> Sample:
    tokens = _ids(ids, column, where)
    labels, real = [True] * len(tokens), [True] * len(tokens)
    for name, mask in masks.items():
        left_out = IGNORED if name == LABELS else 0
        allowed = [(left_out, token if name == LABELS else 1) for token in tokens]
        if (
            not isinstance(mask, list)
            or len(mask) != len(tokens)
            or any(value not in two for value, two in zip(mask, allowed, strict=True))
        ):
            found = f"{len(mask)} values" if isinstance(mask, list) else type(mask).__name__
            values = f"the tokens of {column}, or {IGNORED} for those not to learn" if name == LABELS else "zeros and ones"
            raise UserError(f"{where}: {name} is a list of {values}, one for each of the {len(tokens)} tokens of {column}; got {found}")
        counted = real if name == PADDING else labels
        counted[:] = [one and value != left_out for one, value in zip(counted, mask, strict=True)]
    return Sample.of(list(compress(tokens, real)), list(compress(labels, real)))


def _ids(ids: Any, column: str, where: str) -> list[int]:
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in ids):
        raise UserError(f"{where}: {column} is a list of token ids, whole numbers of at least 0; got {shortened(ids)}")
    return ids
