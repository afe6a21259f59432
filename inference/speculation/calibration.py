"""What a proposer's score is worth: the chance of being the pick, learned from what turned out.

A score is the log of a proposer's own estimate. Proposers are over- or under-sure, each in its own way and at each depth in another,
so for each proposer and depth a table says how often nodes of that score were the pick. It starts as the estimate itself, is refined
with every pass, forgets slowly, and is interpolated, so that the order of nodes of similar scores stays.
"""

from __future__ import annotations

import math
from typing import Any

LOW, HIGH, BINS = -6.0, 6.0, 13
"""Log-odds of the estimates the table has entries for."""
WIDTH = (HIGH - LOW) / (BINS - 1)
PRIOR = 2.0
"""How many observations the estimate itself counts as."""
MEMORY = 400.0
"""About how many observations an entry remembers."""
DEEPEST = 8
"""Depths from here on share a table."""


class Table:
    """Hits and trials by the log-odds of the estimate."""

    def __init__(self, hits: list[float] | None = None, trials: list[float] | None = None) -> None:
        self.hits, self.trials = hits or [0.0] * BINS, trials or [0.0] * BINS

    def _entry(self, i: int) -> float:
        own = 1 / (1 + math.exp(-(LOW + i * WIDTH)))
        return (self.hits[i] + PRIOR * own) / (self.trials[i] + PRIOR)

    def chance(self, score: float) -> float:
        """The chance of being the pick that nodes of this score had."""
        i, share = _place(score)
        return (1 - share) * self._entry(i) + share * self._entry(i + 1)

    def learn(self, score: float, hit: bool) -> None:
        """One more node of this score turned out."""
        i, share = _place(score)
        for entry, weight in ((i, 1 - share), (i + 1, share)):
            keep = 1 - weight / MEMORY
            self.hits[entry] = keep * self.hits[entry] + weight * hit
            self.trials[entry] = keep * self.trials[entry] + weight


def _place(score: float) -> tuple[int, float]:
    """The entry below a score, and how far towards the next one it lies."""
    odds = score - math.log(-math.expm1(min(score, -1e-6))) if score > -30 else score
    place = (min(max(odds, LOW), HIGH) - LOW) / WIDTH
    i = min(int(place), BINS - 2)
    return i, place - i


class Calibration:
    """A table for each proposer and depth (1: the root's children)."""

    def __init__(self) -> None:
        self.tables: dict[tuple[str, int], Table] = {}

    def table(self, source: str, depth: int) -> Table:
        key = (source, min(depth, DEEPEST))
        if key not in self.tables:
            self.tables[key] = Table()
        return self.tables[key]

    def to_json(self) -> list[dict[str, Any]]:
        """For the file beside the checkpoint; `from_json` is the inverse."""
        return [{"source": source, "depth": depth, "hits": t.hits, "trials": t.trials} for (source, depth), t in self.tables.items()]

    @staticmethod
    def from_json(tables: list[dict[str, Any]]) -> Calibration:
        found = Calibration()
        for one in tables:
            found.tables[one["source"], one["depth"]] = Table(list(one["hits"]), list(one["trials"]))
        return found
