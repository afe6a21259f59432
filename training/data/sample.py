"""Samples, and rows that hold them as exact tokens: ``input_ids`` with ``loss_mask``, as speculators and SpecForge name them.

Shape suffix: T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.support.chat.messages import shortened
from headstart.support.errors import UserError
from headstart.support.json_text import Row

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
