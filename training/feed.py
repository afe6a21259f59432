"""Which samples make an optimiser step, and which of them this process reads.

Both are functions of the step alone: nothing to save, nothing that a resumed run or another number of processes could get
wrong. Epochs follow each other without a gap, so every step has the whole ``batch_size``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from headstart.training.data import Batch, Sample, collate, order
from headstart.training.recipe import Train


@dataclass(frozen=True)
class Feed:
    samples: list[Sample]
    train: Train
    seed: int
    process: int = 0
    processes: int = 1

    @property
    def steps(self) -> int:
        """How many optimiser steps the recipe asks for."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.epochs is not None
        return max(1, math.ceil(self.train.epochs * len(self.samples) / self.train.batch_size))

    def chosen(self, step: int) -> list[int]:
        """Indices of the samples of optimiser step ``step`` (from 1), over all processes."""
        start = (step - 1) * self.train.batch_size
        return [self._at(place) for place in range(start, start + self.train.batch_size)]

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, len(self.samples))
        return _order(len(self.samples), epoch, self.seed)[within]

    def share(self, step: int, device: torch.device) -> Iterator[Batch]:
        """This process's micro-batches of the step: samples of like length together, so that little is padded."""
        ranked = sorted(self.chosen(step), key=lambda index: -len(self.samples[index].tokens))
        mine = ranked[self.process :: self.processes]
        size = self.train.micro_batch or len(mine)
        for start in range(0, len(mine), size):
            batch = collate([self.samples[index] for index in mine[start : start + size]])
            yield Batch(batch.tokens_BT.to(device), batch.learn_BT.to(device), batch.document_BT.to(device))


@lru_cache(2)   # an epoch's order is asked for once a sample
def _order(samples: int, epoch: int, seed: int) -> list[int]:
    return order(samples, epoch, seed)
