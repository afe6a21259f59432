"""Latency of a forward pass on this machine by batch size, tree size and context: from `headstart tune`, or timed while decoding.

Estimates come from a table of `headstart tune` or from a line fitted to the times so far; both are corrected by the times of real passes.
Captured passes are faster than eager ones, so their costs are kept separately. All times are in seconds.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from headstart.inference.engine.sizes import TREE_SIZES, octave

RECENT_TIMES = 9
"""Number of recent times kept per kind; their median is used, so that one slow pass changes nothing."""
MIN_TIMES = 3
"""Number of times of one size from which on their median replaces the estimate."""
DEFAULT_SLOPE = 0.03
"""Cost of one more position as a fraction of a pass, before two sizes have been timed."""
DEFAULT_SECONDS = 1e-3
"""Seconds of an autoregressive step before anything has been timed; only ratios matter then."""
MAX_SECONDS = 1e6
"""Seconds of a pass in a file are below this."""
MIN_CONTEXT = 256
"""Contexts up to this many tokens have the same costs."""
MIN_INTERVAL, MAX_INTERVAL = 6, 100
"""Steps with drafts after which two autoregressive ones are made to time the second, at least and at most."""
TIMING_SHARE = 0.01
"""Fraction of the decoding time that these steps may cost, between the two."""
Curves = dict[int, list[tuple[int, float]]]
"""Points (nodes, seconds of a pass) in ascending order, by batch size."""


class RecentTimes:
    """The median of the last few times."""

    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=RECENT_TIMES)
        self.median = 0.0

    def add(self, seconds: float) -> None:
        self.times.append(seconds)
        self.median = statistics.median(self.times)

    def __bool__(self) -> bool:
        return bool(self.times)


@dataclass
class Costs:
    """Times of a decoding step and its parts, at contexts of similar length."""

    curves: Curves = field(default_factory=dict)
    """From `headstart tune`, or estimated from the costs at another length."""
    passes: dict[tuple[int, int], RecentTimes] = field(default_factory=dict)
    """Times of forward passes by rows and nodes."""
    parts: dict[tuple[Hashable, int], RecentTimes] = field(default_factory=dict)
    """Times of other parts of a step by name and rows."""
    since: dict[int, int] = field(default_factory=dict)
    """Steps with drafts since an autoregressive one was timed, by `octave` of the rows."""
    _known: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)
    """What `of_pass` returned since a pass was last timed."""

    def add_pass(self, rows: int, nodes: int, seconds: float) -> None:
        """Record the time of a pass over that many nodes per row, CPU overhead included."""
        self.passes.setdefault((rows, nodes), RecentTimes()).add(seconds)
        self._known.clear()
        if nodes == 1:
            self.since[octave(rows)] = 0

    def count_drafted(self, rows: int) -> None:
        """Count a step with drafts."""
        if octave(rows) in self.since or rows in self.curves:
            self.since[octave(rows)] = self.since.get(octave(rows), 0) + 1

    def plain_timed(self, rows: int) -> bool:
        """True once an autoregressive step of about that many rows has been timed."""
        return octave(rows) in self.since

    def plain_due(self, rows: int, rate: float) -> bool:
        """True if an autoregressive step should be timed: what drafts bring is compared with it, and drafts that pay leave none to time.

        ``rate``: recent tokens per second; 0: not known. The less drafts bring, the more it matters and the less it costs.
        """
        if not self.plain_timed(rows):
            return rows not in self.curves
        lost = 2 * (1 - rows / (rate * self.of_pass(rows, 1))) if rate else 0.0
        return self.since[octave(rows)] >= min(max(lost / TIMING_SHARE, MIN_INTERVAL), MAX_INTERVAL)

    def add(self, part: Hashable, rows: int, seconds: float) -> None:
        """Record the time of another part of a step."""
        self.parts.setdefault((part, rows), RecentTimes()).add(seconds)

    def part(self, part: Hashable, rows: int, at_least: int = 1) -> float:
        """Seconds of a part of a step; 0 until it has been timed ``at_least`` times."""
        known = self.parts.get((part, rows))
        return known.median if known and len(known.times) >= at_least else 0.0

    def of_pass(self, rows: int, nodes: int) -> float:
        """Seconds of a pass over that many nodes per row; at most the measured time of any larger pass."""
        seconds = self._known.get((rows, nodes))
        if seconds is None:
            bound = min((recent.median for (r, n), recent in self.passes.items() if r == rows and n >= nodes), default=math.inf)
            seconds = self._known[rows, nodes] = min(max(self._estimate(rows, nodes), self._estimate(rows, 1)), bound)
        return seconds

    def _estimate(self, rows: int, nodes: int) -> float:
        """The measured time of that size, or an estimate from other sizes."""
        recent = self.passes.get((rows, nodes))
        if recent and len(recent.times) >= MIN_TIMES:
            return recent.median
        if rows in self.curves:
            return interpolated(self.curves[rows], nodes) * self._drift(rows)
        plain = {r: recent.median for (r, n), recent in self.passes.items() if n == 1 and octave(r) == octave(rows)}
        if nodes == 1 and plain:
            return plain[min(plain, key=lambda r: (abs(r - rows), r))]
        return self._line(rows * nodes)

    def _drift(self, rows: int) -> float:
        """The current slowdown of the machine relative to its curve."""
        known = [(n, recent.median) for (r, n), recent in self.passes.items() if r == rows]
        return statistics.median(s / interpolated(self.curves[rows], n) for n, s in known) if known else 1.0

    def _line(self, positions: int) -> float:
        """A line fitted to all times by positions, that is rows times nodes, which determine the cost."""
        points = [(r * n, recent.median) for (r, n), recent in self.passes.items()]
        points = points or [(r * n, s) for r, curve in self.curves.items() for n, s in curve] or [(1, DEFAULT_SECONDS)]
        mean_p, mean_s = statistics.fmean(p for p, _ in points), statistics.fmean(s for _, s in points)
        spread = sum((p - mean_p) ** 2 for p, _ in points)
        slope = DEFAULT_SLOPE * mean_s if not spread else max(sum((p - mean_p) * (s - mean_s) for p, s in points) / spread, 0.0)
        return max(mean_s + slope * (positions - mean_p), min(s for _, s in points) / 2)   # bounded, since the line may fall below zero

    def at_another_length(self) -> Costs:
        """An estimate for contexts of another length: the same costs, until passes have been timed there."""
        curves = dict(self.curves)
        for rows in {rows for rows, _ in self.passes}:
            nodes = {1, TREE_SIZES[-1], *(n for r, n in self.passes if r == rows)}
            curves[rows] = [(n, self.of_pass(rows, n)) for n in sorted(nodes)]
        costs = Costs(curves)
        for (part, rows), recent in self.parts.items():
            costs.add(part, rows, recent.median)
        return costs


class CostModel:
    """Costs by context length (attention costs nodes times context), in buckets of doubling size, for captured and uncaptured passes."""

    def __init__(self, measured: dict[int, Curves] | None = None) -> None:
        """``measured``: curves by context length in tokens."""
        self.measured = {_bucket(context): curves for context, curves in (measured or {}).items()}
        self.timed: dict[bool, dict[int, Costs]] = {False: {}, True: {}}
        """Costs by capture (True: captured) and bucket."""

    def at(self, context: int, captured: bool = False) -> Costs:
        """The costs at that context length; initially those of the nearest known length."""
        bucket, timed = _bucket(context), self.timed[captured]
        if bucket not in timed:
            nearest = min({**self.measured, **timed}, key=lambda other: (abs(other - bucket), other), default=None)
            if nearest is None:
                timed[bucket] = Costs()
            else:
                timed[bucket] = timed[nearest].at_another_length() if nearest in timed else Costs(dict(self.measured[nearest]))
        return timed[bucket]

    @staticmethod
    def from_json(measured: dict[str, Any]) -> CostModel:
        """From ``{context: {rows: [[nodes, seconds], ...]}}``. Raises ValueError or TypeError unless it is that, with times above 0."""
        return CostModel({int(context): _curves(curves) for context, curves in measured.items()})


def _curves(curves: dict[str, Any]) -> Curves:
    return {int(rows): _curve(rows, curve) for rows, curve in curves.items()}


def _curve(rows: str, curve: list[Any]) -> list[tuple[int, float]]:
    points = [(int(nodes), float(seconds)) for nodes, seconds in curve]
    sizes = [nodes for nodes, _ in points]
    if not points or sizes[0] < 1 or sizes != sorted(set(sizes)) or not all(0 < seconds < MAX_SECONDS for _, seconds in points):
        raise ValueError(f"a curve has nodes in ascending order, each with seconds above 0; got {str(curve)[:60]} for {rows} rows")
    return points


def _bucket(context: int) -> int:
    return (max(context, MIN_CONTEXT) - 1).bit_length()


def interpolated(curve: list[tuple[int, float]], nodes: int) -> float:
    """The seconds at ``nodes``: interpolate linearly; extrapolate with the slope of the outermost segment."""
    if len(curve) == 1:
        return curve[0][1]
    i = min(max(bisect_left(curve, (nodes, 0.0)), 1), len(curve) - 1)
    (low, before), (high, after) = curve[i - 1], curve[i]
    return before + (after - before) * (nodes - low) / (high - low)
