"""Exponential moving average of the trained weights (``train.ema_decay``), used for evaluation and for the saved heads.

After step t the average moves towards the weights by ``1 - min(ema_decay, (1 + t) / (10 + t))``; early steps are large, so that the
initial weights are soon forgotten. It has the weights' dtype and is part of the saved state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headstart.training.run.sharding import distribute_like, to_local


class Average:
    """Average of the named parameters ``trained``, which must stay the same objects during training."""

    def __init__(self, trained: Mapping[str, nn.Parameter], decay: float) -> None:
        self.trained, self.decay = {name: weight for name, weight in trained.items() if weight.requires_grad}, decay
        self.weights = {name: weight.detach().clone() for name, weight in self.trained.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average after optimiser step ``step``, counted from 1."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        for name, average in self.weights.items():
            to_local(average).lerp_(to_local(self.trained[name]), share)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Load averaged weights; names must match exactly."""
        assert weights.keys() == self.weights.keys()
        for name, average in self.weights.items():
            average.copy_(distribute_like(weights[name], average))


@contextmanager
def in_place_of_weights(average: Average | None) -> Iterator[None]:
    """Swap the averaged weights into the parameters inside the context; without an average, do nothing."""
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
