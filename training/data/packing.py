"""Rows of a batch: samples side by side, and who of them may look at whom.

A sample is a document. A row may hold one, or as many as fit a window; a document is never cut here. In a row of several
the backbone reads each as if it stood alone: positions begin again at 0, and no position sees another document.

Shape suffixes: B batch, T positions.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.support.errors import UserError
from headstart.training.data.data import Sample


@dataclass(frozen=True)
class Batch:
    """Padded on the right, where the token is 0 and the document -1."""

    tokens_BT: Tensor
    loss_mask_BT: Tensor
    document_BT: Tensor
    """0, 1, ... along a row."""
    members: tuple[tuple[int, ...], ...]
    """Per row, which samples of the training data it holds, in order."""

    @property
    def packed(self) -> bool:
        """Whether some row holds several documents."""
        return any(len(row) > 1 for row in self.members)

    def to(self, device: torch.device) -> Batch:
        return Batch(self.tokens_BT.to(device), self.loss_mask_BT.to(device), self.document_BT.to(device), self.members)


def collate(samples: Sequence[Sample], rows: Sequence[Sequence[int]]) -> Batch:
    """Those samples (indices, per row) as one batch."""
    tokens = [torch.cat([samples[i].tokens for i in row]) for row in rows]
    learn = [torch.cat([samples[i].loss_mask for i in row]) for row in rows]
    document = [torch.cat([torch.full_like(samples[i].tokens, place) for place, i in enumerate(row)]) for row in rows]
    return Batch(
        pad_sequence(tokens, batch_first=True),
        pad_sequence(learn, batch_first=True),
        pad_sequence(document, batch_first=True, padding_value=-1),
        tuple(tuple(row) for row in rows),
    )


def nothing(length: int) -> Batch:
    """A row without a document: what a process reads to keep step with others that have one more micro-batch."""
    tokens_1T = torch.zeros(1, length, dtype=torch.int64)
    return Batch(tokens_1T, torch.zeros_like(tokens_1T, dtype=torch.bool), torch.full_like(tokens_1T, -1), ((),))


def best_fit(lengths: Sequence[int], order: Sequence[int], window: int) -> list[list[int]]:
    """Rows of at most ``window`` tokens, each sample in one of them: the longest first, into the fullest row that has room.

    ``order`` (the indices, shuffled) decides among equals. How many rows there are depends on the lengths alone.
    """
    rows: list[list[int]] = []
    room: list[list[int]] = [[] for _ in range(window + 1)]
    """Room left -> the rows that have exactly so much."""
    open_rooms = 0   # bit r is set where room[r] is not empty: the least room that suffices is found by arithmetic
    for index in sorted(order, key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > window:
            raise UserError(
                f"a sample of {length} tokens does not fit a window of {window}; raise data.max_length or set data.overlong=split"
            )
        fitting = open_rooms >> length
        left = length + (fitting & -fitting).bit_length() - 1 if fitting else window
        row = room[left].pop() if fitting else len(rows)
        if fitting and not room[left]:
            open_rooms ^= 1 << left
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        room[left - length].append(row)
        open_rooms |= 1 << (left - length)
    return rows


def restarting(document_BT: Tensor) -> Tensor:
    """Position of each token within its document, ``[B, T]``."""
    place_T = torch.arange(document_BT.shape[1], device=document_BT.device)
    first_BT = torch.ones_like(document_BT, dtype=torch.bool)
    first_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    return place_T - torch.where(first_BT, place_T, 0).cummax(1).values


def documents_apart(document_BT: Tensor, windows: dict[str, int | None]) -> dict[str, Tensor]:
    """For each kind of attention layer ``[B, T, T]``, True where a position may look: back, within its document and window."""
    T = document_BT.shape[1]
    place_T = torch.arange(T, device=document_BT.device)
    back_TT = place_T[:, None] - place_T
    allowed_BTT = (document_BT[:, :, None] == document_BT[:, None, :]) & (back_TT >= 0)
    return {kind: allowed_BTT if window is None else allowed_BTT & (back_TT < window) for kind, window in windows.items()}
