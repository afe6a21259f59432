"""Acceptance probabilities from a source's scores, learned from verified drafts.

A score is the log of a source's own estimate. Sources are over- or under-confident, each in its own way and differently at each depth, so
each source has a table for each depth: how often nodes of that score were the pick. A table starts as the estimate itself, is refined
with every verified tree, forgets slowly, and is interpolated, so that the order of nodes of similar scores stays.
"""

from __future__ import annotations

import math
from typing import Any

LOW, HIGH, BINS = -6.0, 6.0, 13
"""Log-odds of the estimates the table has entries for."""
BIN_WIDTH = (HIGH - LOW) / (BINS - 1)
PRIOR = 2.0
"""How many observations the estimate itself counts as."""
HORIZON = 400.0
"""About how many observations an entry remembers."""
LAST_TABLE = 7
"""Depths from here on share a table."""


class Table:
    """Hits and trials by the log-odds of the estimate."""

    def __init__(self, hits: list[float] | None = None, trials: list[float] | None = None) -> None:
        self.hits, self.trials = hits or [0.0] * BINS, trials or [0.0] * BINS

    def _entry(self, i: int) -> float:
        estimate = 1 / (1 + math.exp(-(LOW + i * BIN_WIDTH)))
        return (self.hits[i] + PRIOR * estimate) / (self.trials[i] + PRIOR)

    def prob(self, score: float) -> float:
        """The acceptance probability that nodes of this score had."""
        i, share = _bin(score)
        return (1 - share) * self._entry(i) + share * self._entry(i + 1)

    def learn(self, score: float, hit: bool) -> None:
        """One more node of this score was verified."""
        i, share = _bin(score)
        for entry, weight in ((i, 1 - share), (i + 1, share)):
            keep = 1 - weight / HORIZON
            self.hits[entry] = keep * self.hits[entry] + weight * hit
            self.trials[entry] = keep * self.trials[entry] + weight


def _bin(score: float) -> tuple[int, float]:
    """The entry below a score, and how far towards the next one it lies."""
    odds = score - math.log(-math.expm1(min(score, -1e-6))) if score > -30 else score
    place = (min(max(odds, LOW), HIGH) - LOW) / BIN_WIDTH
    i = min(int(place), BINS - 2)
    return i, place - i


class Calibration:
    """One source's tables, by depth."""

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def table(self, depth: int) -> Table:
        depth = min(depth, LAST_TABLE)
        while len(self.tables) <= depth:
            self.tables.append(Table())
        return self.tables[depth]

    def to_json(self) -> list[dict[str, Any]]:
        """For the file beside the checkpoint; `from_json` is the inverse."""
        return [{"depth": depth, "hits": table.hits, "trials": table.trials} for depth, table in enumerate(self.tables)]

    @staticmethod
    def from_json(tables: list[dict[str, Any]]) -> Calibration:
        calibration = Calibration()
        for one in tables:
            calibration.tables.append(Table(list(one["hits"]), list(one["trials"])))
        return calibration
