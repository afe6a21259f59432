"""Batches: rows of one or several samples.

A sample is a document. A row holds one document or, packed, as many as fit; documents are never split here. Documents of a packed row
are independent: positions restart at 0, and no position attends to another document.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.chat.images import ImageFile
from headstart.support.errors import UserError
from headstart.training.data.sample import Sample

FORWARD_TOKENS = 8192
"""Positions of a forward pass over a batch of samples, padding included."""


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right with token 0 and document -1."""

    tokens_BT: Tensor
    loss_mask_BT: Tensor
    document_BT: Tensor
    """Document index of each position: 0, 1, ... along a row."""
    members: tuple[tuple[int, ...], ...]
    """Indices of each row's samples, in order."""
    images: tuple[tuple[tuple[ImageFile, ...], ...], ...] = ()
    """Of each row's samples."""

    @property
    def packed(self) -> bool:
        """True if a row holds several documents."""
        return any(len(row) > 1 for row in self.members)

    def to(self, device: torch.device) -> Batch:
        return Batch(self.tokens_BT.to(device), self.loss_mask_BT.to(device), self.document_BT.to(device), self.members, self.images)


def collate(samples: Sequence[Sample], rows: Sequence[Sequence[int]]) -> Batch:
    """Make a batch of rows, each given by the indices of its samples."""
    tokens = [torch.cat([samples[i].tokens for i in row]) for row in rows]
    loss_mask = [torch.cat([samples[i].loss_mask for i in row]) for row in rows]
    document = [torch.cat([torch.full_like(samples[i].tokens, number) for number, i in enumerate(row)]) for row in rows]
    return Batch(
        pad_sequence(tokens, batch_first=True),
        pad_sequence(loss_mask, batch_first=True),
        pad_sequence(document, batch_first=True, padding_value=-1),
        tuple(tuple(row) for row in rows),
        tuple(tuple(samples[i].images for i in row) for row in rows),
    )


def empty_batch(length: int) -> Batch:
    """Make a batch of one row of padding, for a process with fewer micro-batches than others."""
    tokens_1T = torch.zeros(1, length, dtype=torch.int64)
    return Batch(tokens_1T, torch.zeros_like(tokens_1T, dtype=torch.bool), torch.full_like(tokens_1T, -1), ((),))


def batches_by_length(samples: Sequence[Sample], indices: Iterable[int], positions: int = FORWARD_TOKENS) -> Iterator[list[int]]:
    """Group samples of similar length, by their indices, to reduce padding; depends on the samples only.

    ``positions``: of a batch, padding included.
    """
    batch: list[int] = []
    for i in sorted(indices, key=lambda i: len(samples[i].tokens)):
        if batch and (len(batch) + 1) * len(samples[i].tokens) > positions:
            yield batch
            batch = []
        batch.append(i)
    yield batch


def pack(lengths: Sequence[int], order: Sequence[int], row_length: int) -> list[list[int]]:
    """Pack samples into rows by best-fit decreasing: longest sample first, into the fullest row that has room.

    ``order`` (the shuffled indices) breaks ties. The number of rows depends on the lengths only.
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    """Number of free tokens -> rows with exactly that many."""
    rooms = 0  # bit r is set if by_room[r] is not empty, to find the smallest sufficient room with bit operations
    for index in sorted(order, key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > row_length:
            raise UserError(
                f"a sample of {length} tokens does not fit a row of {row_length}; raise data.max_length or set data.overlong=split"
            )
        fitting = rooms >> length
        room = length + (fitting & -fitting).bit_length() - 1 if fitting else row_length
        row = by_room[room].pop() if fitting else len(rows)
        if fitting and not by_room[room]:
            rooms ^= 1 << room
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        by_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows
