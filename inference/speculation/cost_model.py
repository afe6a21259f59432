"""What a pass costs on this machine, by how many rows and nodes it reads behind texts of some length: measured beforehand or on the way.

A curve is a table from `headstart tune`, or a line through what has been seen; either is corrected by what passes really take.
Seconds throughout.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import Any

KEEP = 9
"""Of the last so many times at one place the median counts: one slow pass says nothing."""
ENOUGH = 3
"""So many times at one place say more than the line through the others."""
SLOPE = 0.03
"""What a position is thought to add, in passes, before two kinds of pass have been timed."""
GUESS = 1e-3
"""Seconds of a plain step, before anything has been timed; only ratios count then."""
SHORT = 256
"""Texts up to this many tokens cost alike."""
Curves = dict[int, list[tuple[int, float]]]
"""For a number of rows, seconds of a pass by nodes, ascending."""
SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""The sizes of trees that are chosen from: few, so that each is met often."""


class Recent:
    """The median of the last few times."""

    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=KEEP)
        self.median = 0.0

    def add(self, seconds: float) -> None:
        self.times.append(seconds)
        self.median = statistics.median(self.times)

    def __bool__(self) -> bool:
        return bool(self.times)


@dataclass
class Costs:
    """Times of the parts of a pass, behind texts of about one length."""

    curves: Curves = field(default_factory=dict)
    """What `headstart tune` measured, or what texts of another length cost."""
    seen: dict[tuple[int, int], Recent] = field(default_factory=dict)
    """By rows and nodes."""
    parts: dict[tuple[str, int], Recent] = field(default_factory=dict)
    """Other parts of a pass, by name and rows."""

    def add_pass(self, rows: int, nodes: int, seconds: float) -> None:
        """A pass over that many nodes a row took so long, the host's work on it included."""
        self.seen.setdefault((rows, nodes), Recent()).add(seconds)

    def add(self, part: str, rows: int, seconds: float) -> None:
        """Another part of a pass took so long."""
        self.parts.setdefault((part, rows), Recent()).add(seconds)

    def part(self, part: str, rows: int) -> float:
        """0 while it has not been timed."""
        known = self.parts.get((part, rows))
        return known.median if known else 0.0

    def knows(self, rows: int) -> bool:
        """Whether passes of that many rows can be told anything of: some pass has been timed, here or beforehand."""
        return bool(self.curves or self.seen)

    def of_pass(self, rows: int, nodes: int) -> float:
        """Seconds of a pass over that many nodes a row; never less than a smaller one is known to take."""
        least = min((recent.median for (r, n), recent in self.seen.items() if r == rows and n >= nodes), default=math.inf)
        return min(max(self._own(rows, nodes), self._own(rows, 1)), least)

    def _own(self, rows: int, nodes: int) -> float:
        """What is known of exactly that size, or follows from the others."""
        seen = self.seen.get((rows, nodes))
        if seen and len(seen.times) >= ENOUGH:
            return seen.median
        if rows in self.curves:
            return _on(self.curves[rows], nodes) * self._drift(rows)
        return self._line(rows * nodes)

    def _drift(self, rows: int) -> float:
        """How much slower than the curve this machine is today."""
        known = [(n, recent.median) for (r, n), recent in self.seen.items() if r == rows]
        return statistics.median(s / _on(self.curves[rows], n) for n, s in known) if known else 1.0

    def _line(self, positions: int) -> float:
        """Through all that has been timed, by the positions read: rows times nodes, since it is they that cost."""
        points = [(r * n, recent.median) for (r, n), recent in self.seen.items()]
        points = points or [(r * n, s) for r, curve in self.curves.items() for n, s in curve] or [(1, GUESS)]
        mean_p, mean_s = statistics.fmean(p for p, _ in points), statistics.fmean(s for _, s in points)
        spread = sum((p - mean_p) ** 2 for p, _ in points)
        slope = SLOPE * mean_s if not spread else max(sum((p - mean_p) * (s - mean_s) for p, s in points) / spread, 0.0)
        return max(mean_s + slope * (positions - mean_p), min(s for _, s in points) / 2)   # no less: a line may fall below nothing

    def elsewhere(self) -> Costs:
        """What is thought of texts of another length at first: the same, until passes have been timed there."""
        curves = dict(self.curves)
        for rows in {rows for rows, _ in self.seen}:
            nodes = {1, SIZES[-1], *(n for r, n in self.seen if r == rows)}
            curves[rows] = [(n, self.of_pass(rows, n)) for n in sorted(nodes)]
        found = Costs(curves)
        for (part, rows), recent in self.parts.items():
            found.add(part, rows, recent.median)
        return found


class CostsByLength:
    """Costs among texts of about one length each, doubling from one to the next: attention costs by nodes times context."""

    def __init__(self, measured: dict[int, Curves] | None = None) -> None:
        """``measured``: by context, in tokens."""
        self.measured = {_doublings(context): curves for context, curves in (measured or {}).items()}
        self.known: dict[int, Costs] = {}

    def at(self, context: int) -> Costs:
        """Behind texts of so many tokens; at first what is known of the nearest length."""
        place = _doublings(context)
        if place not in self.known:
            nearest = min({**self.measured, **self.known}, key=lambda other: (abs(other - place), other), default=None)
            if nearest is None:
                self.known[place] = Costs()
            else:
                self.known[place] = self.known[nearest].elsewhere() if nearest in self.known else Costs(dict(self.measured[nearest]))
        return self.known[place]

    def forget(self, part: str | None = None) -> None:
        """What was timed on the way of that part, or of all: the functions timed have been recorded and are faster now."""
        if part is None:
            self.known.clear()
        for costs in self.known.values():
            costs.parts = {key: recent for key, recent in costs.parts.items() if key[0] != part}

    @staticmethod
    def from_json(measured: dict[str, Any]) -> CostsByLength:
        """``{context: {rows: [[nodes, seconds], ...]}}``."""
        return CostsByLength({int(context): _curves(found) for context, found in measured.items()})


def _curves(found: dict[str, Any]) -> Curves:
    return {int(rows): [(int(nodes), float(seconds)) for nodes, seconds in curve] for rows, curve in found.items()}


def _doublings(context: int) -> int:
    return (max(context, SHORT) - 1).bit_length()


def _on(curve: list[tuple[int, float]], nodes: int) -> float:
    """Interpolated; beyond its end the curve goes on as straight as its last piece."""
    if len(curve) == 1:
        return curve[0][1]
    i = min(max(bisect_left(curve, (nodes, 0.0)), 1), len(curve) - 1)
    (low, before), (high, after) = curve[i - 1], curve[i]
    return before + (after - before) * (nodes - low) / (high - low)
