"""Latency of a forward pass on this machine by batch size, tree size and context, timed while decoding.

Estimates come from a line fitted to the times so far or from those at another context length; both are corrected by the times of real
passes. Where nothing is known, the first steps are of known sizes: trees, then plain ones. Captured passes are faster than eager ones, so
their costs are kept separately. All times are in seconds.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from headstart.inference.engine.tree import TREE_SIZES, octave

RECENT_TIMES, LOW = 15, 4
"""Number of recent times kept per kind, and the quantile that counts, the lowest quarter's: most of them may be of moments in which the
machine was busy. An estimate that is too low corrects itself, since such passes are made; those that seem slow are not made again."""
MIN_TIMES = 3
"""Number of times that are enough to compare others with. One alone says little: it may include what is loaded first."""
FASTER = 0.5
"""A time of less than this fraction of all recent ones of its kind: the machine was busy then, and what was timed is forgotten."""
FIRST_STEPS = 2
"""Number of trees, and then of plain steps, that are timed where nothing is known."""
FIRST_NODES = 4
"""Most nodes of these trees."""
SAME = 0.01
"""Changes of a time by less than this fraction change no choice."""
DEFAULT_SLOPE = 0.03
"""Cost of one more position as a fraction of a pass, before two sizes have been timed."""
DEFAULT_SECONDS = 1e-3
"""Seconds of an autoregressive step before anything has been timed; only ratios matter then."""
LEAST_GROWTH = 0.25
"""A part of twice the largest size that was timed takes at least this fraction more."""
MIN_CONTEXT = 256
"""Contexts up to this many tokens have the same costs."""
INTERVAL = 100
"""Steps after which a time is old. Of plain steps two are made then to time the second, since drafts that pay leave none to time; other
old times are forgotten with the next draft, since something else may have run at that time, or code been loaded."""
Curves = dict[int, list[tuple[int, float]]]
"""Points (nodes, seconds of a pass) in ascending order, by batch size."""


class RecentTimes:
    """A low quantile of the last few times; of fewer than `LOW` the least."""

    def __init__(self) -> None:
        self.times: deque[float] = deque(maxlen=RECENT_TIMES)
        self.seconds = 0.0
        self.step = 0
        """The step of the last one."""

    def add(self, seconds: float, step: int = 0) -> bool:
        """Record a time; True if all before were of a busy machine, which are forgotten."""
        self.step, faster = step, len(self.times) >= MIN_TIMES and seconds < FASTER * min(self.times)
        if faster:
            self.times.clear()
        self.times.append(seconds)
        self.seconds = sorted(self.times)[len(self.times) // LOW]
        return faster


@dataclass
class Costs:
    """Times of a decoding step and its parts, at contexts of similar length."""

    curves: Curves = field(default_factory=dict)
    """Estimated from the costs at another length."""
    passes: dict[tuple[int, int], RecentTimes] = field(default_factory=dict)
    """Times of forward passes by rows and nodes."""
    parts: dict[tuple[Hashable, int], dict[int, RecentTimes]] = field(default_factory=dict)
    """Times of other parts of a step by name and rows, and by size, such as the depths of a source's drafts."""
    drafted: dict[int, int] = field(default_factory=dict)
    """Steps with drafts since a plain one was timed, by `octave` of the rows."""
    steps: int = 0
    """Passes that were timed."""
    _known: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)
    """What `of_pass` returned since a time changed."""

    def add_pass(self, rows: int, nodes: int, seconds: float) -> None:
        """Record the time of a pass over that many nodes per row, CPU overhead included."""
        self.steps += 1
        recent = self.passes.setdefault((rows, nodes), RecentTimes())
        before = recent.seconds
        if recent.add(seconds, self.steps):
            self.passes, self.parts = {(rows, nodes): recent}, {}
        if nodes > 1:
            for other in [size for size, of in self.passes.items() if octave(size[0]) == octave(rows) and size[1] > 1 and self._old(of)]:
                del self.passes[other]
                self._known.clear()
        if abs(recent.seconds - before) > SAME * before or len(recent.times) <= MIN_TIMES:
            self._known.clear()
        self.drafted[octave(rows)] = 0 if nodes == 1 else self.drafted.get(octave(rows), 0) + 1

    def plain_due(self, rows: int) -> bool:
        """True if a plain step is to be timed: after the first trees where nothing is known, and now and then where drafts pay."""
        first = not self.tree_due(rows) and self._lacks(rows, plain=True)
        return first or self.drafted.get(octave(rows), 0) >= INTERVAL

    def tree_due(self, rows: int) -> bool:
        """True if a tree is to be timed, of up to `FIRST_NODES` nodes."""
        return self._lacks(rows, plain=False)

    def _lacks(self, rows: int, plain: bool) -> bool:
        """True if fewer plain steps, or trees, than `FIRST_STEPS` were timed for about that many rows."""
        if rows in self.curves:
            return False
        return sum(len(of.times) for (r, n), of in self.passes.items() if octave(r) == octave(rows) and (n == 1) == plain) < FIRST_STEPS

    def add_part(self, part: Hashable, rows: int, size: int, seconds: float) -> None:
        """Record the time of another part of a step."""
        known = self.parts.setdefault((part, rows), {})
        known.setdefault(size, RecentTimes()).add(seconds, self.steps)
        self.parts[part, rows] = {other: of for other, of in known.items() if not self._old(of)}

    def _old(self, times: RecentTimes) -> bool:
        return self.steps - times.step > INTERVAL

    def forget_part(self, part: Hashable, rows: int, size: int) -> None:
        """Forget these times: the part is captured now."""
        self.parts.get((part, rows), {}).pop(size, None)

    def of_part(self, part: Hashable, rows: int, size: int) -> float | None:
        """Seconds of a part of a step by those of other sizes and of about that many rows; None until one was timed."""
        near = [r for name, r in self.parts if name == part and octave(r) == octave(rows)]
        known = self.parts[part, min(near, key=lambda r: (abs(r - rows), r))] if near else {}
        if not known:
            return None
        curve = [(0, 0.0), *sorted((n, times.seconds) for n, times in known.items())]
        largest, seconds = curve[-1]
        least = seconds * (1 + LEAST_GROWTH * (size / largest - 1)) if size > largest else 0.0  # the slope may be noise
        return max(interpolated(curve, size), least)

    def of_pass(self, rows: int, nodes: int) -> float:
        """Seconds of a pass over that many nodes per row; at most the measured time of any larger pass."""
        seconds = self._known.get((rows, nodes))
        if seconds is None:
            larger = [recent for (r, n), recent in self.passes.items() if r == rows and n >= nodes and len(recent.times) >= MIN_TIMES]
            bound = min((recent.seconds for recent in larger), default=math.inf)
            seconds = self._known[rows, nodes] = min(max(self._estimate(rows, nodes), self._estimate(rows, 1)), bound)
        return seconds

    def _estimate(self, rows: int, nodes: int) -> float:
        """The measured time of that size, or an estimate from other sizes."""
        recent = self.passes.get((rows, nodes))
        if recent is not None and len(recent.times) > 1:
            return recent.seconds
        if rows in self.curves:
            return interpolated(self.curves[rows], nodes) * self._drift(rows)
        plain = {r: recent.seconds for (r, n), recent in self.passes.items() if n == 1 and octave(r) == octave(rows)}
        if nodes == 1 and plain:
            return plain[min(plain, key=lambda r: (abs(r - rows), r))]
        return self._line(rows * nodes)

    def _drift(self, rows: int) -> float:
        """The current slowdown of the machine relative to its curve."""
        known = [(n, recent.seconds) for (r, n), recent in self.passes.items() if r == rows]
        return statistics.median(s / interpolated(self.curves[rows], n) for n, s in known) if known else 1.0

    def _line(self, positions: int) -> float:
        """A line fitted to all times by positions, that is rows times nodes, which determine the cost."""
        timed = [(r * n, recent.seconds, len(recent.times)) for (r, n), recent in self.passes.items()]
        often = [point for point in timed if point[2] >= MIN_TIMES]
        timed = timed or [(r * n, s, 1) for r, curve in self.curves.items() for n, s in curve] or [(1, DEFAULT_SECONDS, 1)]
        points = often if len({p for p, _, _ in often}) > 1 else timed
        weight = sum(w for _, _, w in points)
        mean_p, mean_s = sum(w * p for p, _, w in points) / weight, sum(w * s for _, s, w in points) / weight
        spread = sum(w * (p - mean_p) ** 2 for p, _, w in points)
        slope = DEFAULT_SLOPE * mean_s if not spread else max(sum(w * (p - mean_p) * (s - mean_s) for p, s, w in points) / spread, 0.0)
        return max(mean_s + slope * (positions - mean_p), min(s for _, s, _ in points) / 2)  # bounded, since the line may fall below zero

    def at_another_length(self) -> Costs:
        """An estimate for contexts of another length: the same costs, until passes have been timed there."""
        curves = dict(self.curves)
        for rows in {rows for rows, _ in self.passes}:
            nodes = {1, TREE_SIZES[-1], *(n for (r, n), recent in self.passes.items() if r == rows and len(recent.times) >= MIN_TIMES)}
            curves[rows] = [(n, self.of_pass(rows, n)) for n in sorted(nodes)]
        costs = Costs(curves)
        for (part, rows), known in self.parts.items():
            for size, recent in known.items():
                costs.add_part(part, rows, size, recent.seconds)
        return costs


class CostModel:
    """Costs by context length (attention costs nodes times context), in buckets of doubling size, and by how passes are made."""

    def __init__(self) -> None:
        self.timed: dict[str, dict[int, Costs]] = {}
        """Costs by how passes are made and by bucket."""

    def at(self, context: int, made: str = "") -> Costs:
        """The costs at that context length; initially those of the nearest known length. ``made``: see `Captured.made`."""
        bucket, timed = _bucket(context), self.timed.setdefault(made, {})
        if bucket not in timed:
            nearest = min(timed, key=lambda other: (abs(other - bucket), other), default=None)
            timed[bucket] = Costs() if nearest is None else timed[nearest].at_another_length()
        return timed[bucket]


def _bucket(context: int) -> int:
    return (max(context, MIN_CONTEXT) - 1).bit_length()


def interpolated(curve: list[tuple[int, float]], nodes: int) -> float:
    """The seconds at ``nodes``: interpolate linearly; extrapolate with the slope of the outermost segment."""
    if len(curve) == 1:
        return curve[0][1]
    i = min(max(bisect_left(curve, (nodes, 0.0)), 1), len(curve) - 1)
    (low, before), (high, after) = curve[i - 1], curve[i]
    return before + (after - before) * (nodes - low) / (high - low)
