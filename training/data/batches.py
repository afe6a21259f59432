"""Batches: rows of one or several samples, the rows of each optimiser step, and this process's share of them.

A sample is a document. A row holds one document or, packed, as many as fit ``row_length`` tokens; documents are never split here. Those of
a packed row are independent: positions restart at 0, and no position attends to another document.

Which rows a step reads depends on the step alone: there is no state to save, and a resumed run or another number of processes reads the
same data. Batches may span epochs, so every step has ``batch_size`` rows; samples are packed differently in every epoch.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

import hashlib
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.chat.images import ImageFile
from headstart.support.errors import UserError
from headstart.support.files import value_hash
from headstart.training.data.samples import Sample
from headstart.training.data.tokenise import MIN_TOKENS
from headstart.training.recipe.recipe import Train

FORWARD_TOKENS = 8192
"""Positions of a forward pass over a batch of samples, padding included."""
Row = list[int]
"""Indices of the row's samples."""


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


def batches_by_length(samples: Sequence[Sample], indices: Iterable[int], positions: int = FORWARD_TOKENS) -> Iterator[list[int]]:
    """Group samples of similar length, by their indices, into batches of so many positions, padding included."""
    batch: list[int] = []
    for i in sorted(indices, key=lambda i: len(samples[i].tokens)):
        if batch and (len(batch) + 1) * len(samples[i].tokens) > positions:
            yield batch
            batch = []
        batch.append(i)
    yield batch


def pack(lengths: Sequence[int], order: Sequence[int], row_length: int) -> list[list[int]]:
    """Pack samples into rows by best-fit decreasing: longest first, into the fullest row with room; ``order`` (shuffled) breaks ties."""
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(row_length + 1)]
    """Number of free tokens -> rows with exactly that many."""
    rooms = 0  # bit r is set if by_room[r] is not empty, to find the smallest sufficient room with bit operations
    for index in sorted(order, key=lambda i: -lengths[i]):
        length = lengths[index]
        if length > row_length:
            remedy = "raise data.max_length or set data.overlong=split"
            raise UserError(f"a sample of {length} tokens does not fit a row of {row_length}; {remedy}")
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


@dataclass(frozen=True)
class Mix:
    """Which samples an epoch reads: all of them once, or, where the datasets have weights, samples of each by its weight.

    An epoch of a mix has as many samples as the datasets have together. Each dataset fills its share from shuffled passes over its
    samples, one after another across epochs, so no sample comes again before all samples of its dataset have been read.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Number of samples of each dataset; the list of all samples holds them one after another."""
    weights: tuple[float, ...]

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Share of each dataset in the samples that are read."""
        return tuple(weight / sum(self.weights) for weight in self.weights)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of samples of each dataset in an epoch, at least 1."""
        return tuple(max(1, round(share * sum(self.sizes))) for share in self.shares)

    def order(self, epoch: int, seed: int) -> list[int]:
        """Return the indices of the epoch's samples, shuffled."""
        indices: list[int] = []
        first = 0
        for number, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            indices += [first + index for index in _stream(size, epoch * count, count, f"{seed}/dataset {number}")]
            first += size
        random.Random(f"{seed}/mix/{epoch}").shuffle(indices)
        return indices

    def __str__(self) -> str:
        each = zip(self.names, self.shares, self.counts, self.sizes, strict=True)
        return ", ".join(f"{name} {share:.1%} ({count / size:.2g} passes an epoch)" for name, share, count, size in each)


def epoch_order(count: int, epoch: int, seed: int | str) -> list[int]:
    """Shuffle indices as a function of the arguments alone, so that resumed runs and all processes agree."""
    indices = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return indices


def _stream(size: int, start: int, count: int, seed: str) -> Sequence[int]:
    """Return ``count`` indices below ``size`` from position ``start`` of an endless stream of shuffled passes."""
    picked: list[int] = []
    while len(picked) < count:
        number, place = divmod(start + len(picked), size)
        picked += epoch_order(size, number, seed)[place : place + count - len(picked)]
    return picked


@dataclass(frozen=True)
class BatchSampler:
    samples: list[Sample]
    train: Train
    seed: int
    process: int = 0
    processes: int = 1
    row_length: int | None = None
    """Maximum number of tokens of a packed row; None: one sample per row."""
    equal_counts: bool = False
    """Pad with empty micro-batches to the same number in all processes, since they must run a sharded backbone together."""
    mix: Mix | None = None
    """How an epoch draws from several datasets; None: each sample once."""

    @property
    def steps(self) -> int:
        """Optimiser steps of the run."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.epochs is not None
        return max(1, math.ceil(self.train.epochs * self.rows / self.train.batch_size))

    @cached_property
    def rows(self) -> int:
        """Rows per epoch: the same for all epochs, but about the same where a mix is packed."""
        return len(self._epoch(0))

    @cached_property
    def _epoch(self) -> Callable[[int], list[Row]]:
        """The rows of an epoch, in order; those of two are kept, since a step may span both."""
        return lru_cache(2)(self._rows_of)

    def _rows_of(self, epoch: int) -> list[Row]:
        indices = epoch_order(len(self.samples), epoch, self.seed) if self.mix is None else self.mix.order(epoch, self.seed)
        if self.row_length is None:
            return [[index] for index in indices]
        rows = pack([len(sample.tokens) for sample in self.samples], indices, self.row_length)
        return [rows[number] for number in epoch_order(len(rows), epoch, self.seed)]

    @cached_property
    def _ends(self) -> list[int]:
        """Number of rows up to each epoch, as far as they are known; counted for a packed mix only, whose epochs differ in rows."""
        return [0]

    def global_rows(self, step: int) -> list[Row]:
        """Return the rows of optimiser step ``step`` (from 1) over all processes."""
        start = (step - 1) * self.train.batch_size
        return [self._row(number) for number in range(start, start + self.train.batch_size)]

    def _row(self, number: int) -> Row:
        if self.mix is None or self.row_length is None:
            epoch, within = divmod(number, self.rows)
            return self._epoch(epoch)[within]
        while self._ends[-1] <= number:
            self._ends.append(self._ends[-1] + len(self._epoch(len(self._ends) - 1)))
        epoch = bisect_right(self._ends, number) - 1
        return self._epoch(epoch)[number - self._ends[epoch]]

    def local_rows(self, step: int) -> list[list[Row]]:
        """Return the rows of each micro-batch of this process; rows of similar length are grouped to reduce padding."""
        longest_first = sorted(self.global_rows(step), key=lambda row: -sum(len(self.samples[index].tokens) for index in row))
        rows = longest_first[self.process :: self.processes]
        size = self.train.micro_batch or len(rows)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def local_batches(self, step: int, device: torch.device) -> Iterator[Batch]:
        """Yield this process's micro-batches of the step."""
        batches = self.local_rows(step)
        if self.equal_counts:
            padding_1T = torch.zeros(1, MIN_TOKENS, dtype=torch.int64, device=device)
            most = -(-self.train.batch_size // self.processes)  # rows of the first process; no process has more
            for _ in range(-(-most // (self.train.micro_batch or most)) - len(batches)):
                yield Batch(padding_1T, padding_1T.bool(), padding_1T - 1, ((),))
        for rows in batches:
            yield collate(self.samples, rows).to(device)

    @cached_property
    def samples_hash(self) -> str:
        """Hash of all samples, in order, and of the mix; with the recipe it determines the data of each step."""
        return samples_hash(self.samples) + (f" mix {value_hash([self.mix.sizes, self.mix.weights])}" if self.mix is not None else "")


def samples_hash(samples: list[Sample]) -> str:
    """Hash the tokens, loss masks and images."""
    state = hashlib.sha256()
    for sample in samples:
        state.update(f"{len(sample.tokens)} ".encode() + sample.tokens.numpy().tobytes() + sample.loss_mask.numpy().tobytes())
        state.update("".join(image.digest for image in sample.images).encode())
    return state.hexdigest()[:16]
