"""Maps a source's scores to acceptance probabilities, estimated from verified drafts.

A score is the log of a source's own estimate. Sources are over- or under-confident to different degrees at each depth, so each source has
a table for each depth: how often nodes with that score were picked. A table starts as the identity, is updated with every verified tree,
forgets slowly, and is interpolated, so that nodes with similar scores keep their order.
"""

from __future__ import annotations

import math
from typing import Any

LOW, HIGH, BINS = -6.0, 6.0, 13
"""Range and number of the table's entries, in log-odds of the estimate."""
BIN_WIDTH = (HIGH - LOW) / (BINS - 1)
PRIOR = 8.0
"""Weight of the estimate itself, in observations."""
HORIZON = 400.0
"""Approximate number of observations that an entry remembers."""
MAX_TRIALS = 1e9
"""Trials in a file are fewer."""
LAST_TABLE = 7
"""Depths from this one on share a table."""


class Table:
    """Hits and trials, in bins of the estimate's log-odds."""

    def __init__(self, hits: list[float] | None = None, trials: list[float] | None = None) -> None:
        self.hits, self.trials = hits or [0.0] * BINS, trials or [0.0] * BINS

    def _entry(self, i: int) -> float:
        estimate = 1 / (1 + math.exp(-(LOW + i * BIN_WIDTH)))
        return (self.hits[i] + PRIOR * estimate) / (self.trials[i] + PRIOR)

    def prob(self, score: float) -> float:
        """The acceptance probability of nodes with this score."""
        i, share = _bin(score)
        return (1 - share) * self._entry(i) + share * self._entry(i + 1)

    def learn(self, score: float, hit: bool) -> None:
        """Record that a node with this score was verified."""
        i, share = _bin(score)
        for entry, weight in ((i, 1 - share), (i + 1, share)):
            keep = 1 - weight / HORIZON
            self.hits[entry] = keep * self.hits[entry] + weight * hit
            self.trials[entry] = keep * self.trials[entry] + weight


def _bin(score: float) -> tuple[int, float]:
    """The entry below a score, and the fraction of the distance to the next entry."""
    odds = score - math.log(-math.expm1(min(score, -1e-6))) if score > -30 else score
    place = (min(max(odds, LOW), HIGH) - LOW) / BIN_WIDTH
    i = min(int(place), BINS - 2)
    return i, place - i


class Calibration:
    """The tables of one source, by depth."""

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def table(self, depth: int) -> Table:
        depth = min(depth, LAST_TABLE)
        while len(self.tables) <= depth:
            self.tables.append(Table())
        return self.tables[depth]

    def to_json(self) -> list[dict[str, Any]]:
        """The tables as stored next to the checkpoint; `from_json` is the inverse."""
        counts = [{"hits": table.hits, "trials": table.trials} for table in self.tables]
        return [{"depth": i, **{name: [round(count, 2) for count in row] for name, row in one.items()}} for i, one in enumerate(counts)]

    @staticmethod
    def from_json(tables: list[dict[str, Any]]) -> Calibration:
        """The inverse of `to_json`. Raises ValueError, TypeError or KeyError unless it is what that wrote."""
        calibration = Calibration()
        for one in tables:
            hits, trials = ([float(value) for value in one[name]] for name in ("hits", "trials"))
            possible = all(0 <= hit <= trial + 0.01 < MAX_TRIALS for hit, trial in zip(hits, trials, strict=False))
            if not len(hits) == len(trials) == BINS or not possible:
                raise ValueError(f"a table has {BINS} hits and trials, no more hits than trials; got {str(one)[:60]}")
            calibration.tables.append(Table(hits, trials))
        return calibration
