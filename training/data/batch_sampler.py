"""Which rows make an optimiser step, and which of them this process reads.

Both are functions of the step alone: nothing to save, nothing that a resumed run or another number of processes could get
wrong. Epochs follow each other without a gap, so every step has the whole ``batch_size``. A row is one sample or, packed, as
many as fit ``window``; which samples share a row is drawn anew every epoch.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from headstart.training.data.data import SHORTEST, Sample
from headstart.training.data.packing import Batch, best_fit, collate, nothing
from headstart.training.recipe.recipe import Train

Row = list[int]
"""Indices of the samples that stand in it."""


@dataclass(frozen=True)
class BatchSampler:
    samples: list[Sample]
    train: Train
    seed: int
    process: int = 0
    processes: int = 1
    window: int | None = None
    """Tokens a packed row may have; None: a sample a row."""
    even: bool = False
    """Whether every process is to have as many micro-batches of a step as the others, the first of them empty where need be."""

    @property
    def steps(self) -> int:
        """How many optimiser steps the recipe asks for."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.epochs is not None
        return max(1, math.ceil(self.train.epochs * self.rows / self.train.batch_size))

    @cached_property
    def rows(self) -> int:
        """Of an epoch; the same number in each."""
        return len(self._epochs[0])

    @cached_property
    def _epochs(self) -> _Epochs:
        lengths = None if self.window is None else [len(sample.tokens) for sample in self.samples]
        return _Epochs(len(self.samples), self.seed, lengths, self.window)

    def chosen(self, step: int) -> list[Row]:
        """The rows of optimiser step ``step`` (from 1), over all processes."""
        start = (step - 1) * self.train.batch_size
        return [self._at(place) for place in range(start, start + self.train.batch_size)]

    def _at(self, place: int) -> Row:
        epoch, within = divmod(place, self.rows)
        return self._epochs[epoch][within]

    def share(self, step: int, device: torch.device) -> Iterator[Batch]:
        """This process's micro-batches of the step: rows of like length together, so that little is padded."""
        shares = self.shares(step)
        for _ in range(self._most - len(shares) if self.even else 0):
            yield nothing(SHORTEST).to(device)
        for rows in shares:
            yield collate(self.samples, rows).to(device)

    @property
    def _most(self) -> int:
        """Micro-batches of a step that the first process has: none has more."""
        rows = -(-self.train.batch_size // self.processes)
        return -(-rows // (self.train.micro_batch or rows))

    def shares(self, step: int) -> list[list[Row]]:
        """The rows of each of them."""
        ranked = sorted(self.chosen(step), key=lambda row: -sum(len(self.samples[index].tokens) for index in row))
        mine = ranked[self.process :: self.processes]
        size = self.train.micro_batch or len(mine)
        return [mine[start : start + size] for start in range(0, len(mine), size)]

    @cached_property
    def digest(self) -> str:
        """A hash of every sample, in order: with the recipe it determines what each step reads."""
        return digest(self.samples)


class _Epochs:
    """The rows of an epoch, in order. The last two asked for are kept: a step may lie in both."""

    def __init__(self, samples: int, seed: int, lengths: list[int] | None, window: int | None) -> None:
        self.samples, self.seed, self.lengths, self.window = samples, seed, lengths, window
        self.kept: dict[int, list[Row]] = {}

    def __getitem__(self, epoch: int) -> list[Row]:
        if epoch not in self.kept:
            self.kept = {number: rows for number, rows in self.kept.items() if number >= epoch - 1}
            self.kept[epoch] = self._make(epoch)
        return self.kept[epoch]

    def _make(self, epoch: int) -> list[Row]:
        indices = order(self.samples, epoch, self.seed)
        if self.lengths is None or self.window is None:
            return [[index] for index in indices]
        rows = best_fit(self.lengths, indices, self.window)
        return [rows[place] for place in order(len(rows), epoch, self.seed)]


def order(count: int, epoch: int, seed: int) -> list[int]:
    """The order of an epoch: a function of its arguments alone, so a resumed run and any number of processes agree on it."""
    indices = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return indices


def digest(samples: list[Sample]) -> str:
    """A hash of the tokens, and of which are to be learned."""
    found = hashlib.sha256()
    for sample in samples:
        found.update(f"{len(sample.tokens)} ".encode() + sample.tokens.numpy().tobytes() + sample.loss_mask.numpy().tobytes())
    return found.hexdigest()[:16]
