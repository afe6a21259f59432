"""Which samples an epoch reads: all of them once, or, where the datasets have weights, samples of each by its weight.

An epoch of a mix has as many samples as the datasets have together. Each dataset fills its share from shuffled passes over its samples,
one after another across epochs, so no sample comes again before all samples of its dataset have been read. All is a function of the epoch
and the seed: nothing is saved, and a resumed run or another number of processes reads the same samples.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from headstart.support.files import value_hash


@dataclass(frozen=True)
class Mix:
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

    @cached_property
    def digest(self) -> str:
        """Hash of what, beside the samples and the seed, determines the order."""
        return value_hash([self.sizes, self.weights])

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
