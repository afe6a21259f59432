"""Exponential moving average of the trained weights (``train.ema_decay``), used for evaluation and for the saved heads.

After step t the average moves towards the weights by ``1 - min(ema, (1 + t) / (10 + t))``: large steps at first, so that the initial
weights are soon forgotten. It has the weights' dtype and is part of the state a run resumes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headstart.training.run.sharding import distribute_like, to_local


class Average:
    """The average of ``trained``: named parameters, which stay the same objects during training."""

    def __init__(self, trained: Mapping[str, nn.Parameter], decay: float) -> None:
        self.trained, self.decay = {name: weight for name, weight in trained.items() if weight.requires_grad}, decay
        self.weights = {name: weight.detach().clone() for name, weight in self.trained.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Once after each optimiser step, counted from 1."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, average in self.weights.items():
            to_local(average).lerp_(to_local(self.trained[name]), share)

    def load(self, weights: dict[str, Tensor]) -> None:
        """The inverse of ``weights``; strict."""
        assert weights.keys() == self.weights.keys()
        for name, average in self.weights.items():
            average.copy_(distribute_like(weights[name], average))


@contextmanager
def in_place_of_weights(average: Average | None) -> Iterator[None]:
    """Inside the context the parameters have the averaged values; without an average, nothing changes."""
    _exchange(average)
    try:
        yield
    finally:
        _exchange(average)


def _exchange(average: Average | None) -> None:
    if average is not None:
        for name, values in average.weights.items():
            weight = average.trained[name]
            average.weights[name], weight.data = weight.data, values
