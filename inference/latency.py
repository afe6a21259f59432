"""Latency of the parts of a step on this machine by rows, size and context, timed while decoding: low quantiles of recent times.

What was not timed is estimated by other sizes and numbers of rows. Where nothing is known, the first steps are of known sizes: trees, then
plain ones. Captured passes are faster than eager ones, so their costs are kept separately. All times are in seconds.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable, Sequence

from headstart.inference.engine.tree import octave

PASS = "pass"
"""The name of forward passes among the parts of a step; their size is the nodes of a row."""
RECENT_TIMES, LOW = 15, 4
"""Number of recent times kept per kind, and the quantile that counts, the lowest quarter's: most of them may be of moments in which the
machine was busy. An estimate that is too low corrects itself, since such passes are made; those that seem slow are not made again."""
MIN_TIMES = 3
"""Number of times that are enough to compare others with. One alone says little: it may include what is loaded first."""
FASTER = 0.5
"""A pass of less than this fraction of all recent ones of its kind: the machine was busy then, and what was timed is forgotten."""
FIRST_STEPS = 2
"""Number of trees, and then of plain steps, that are timed where nothing is known."""
FIRST_NODES = 4
"""Most nodes of these trees."""
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
old times are forgotten with the next of their kind, since something else may have run at that time, or code been loaded."""


class RecentTimes:
    """A low quantile of the last few times; of fewer than `LOW` the least. ``step``: when the last one was taken."""

    def __init__(self, times: Iterable[float] = ()) -> None:
        self.times, self.seconds, self.step = deque[float](maxlen=RECENT_TIMES), 0.0, 0
        for seconds in times:
            self.add(seconds)

    def add(self, seconds: float, step: int = 0) -> bool:
        """Record a time; True if all before were of a busy machine, which are forgotten. After a long while, they count as one."""
        if step - self.step > INTERVAL and self.times:
            self.times = deque([self.seconds], RECENT_TIMES)
        self.step, faster = step, len(self.times) >= MIN_TIMES and seconds < FASTER * min(self.times)
        if faster:
            self.times.clear()
        self.times.append(seconds)
        self.seconds = sorted(self.times)[len(self.times) // LOW]
        return faster


class Costs:
    """Times of the parts of a step, at contexts of similar length."""

    def __init__(self) -> None:
        self.times: dict[tuple[Hashable, int], dict[int, RecentTimes]] = {}
        """By the part's name and the number of rows, and by size: nodes of a row, or the depths of a source's drafts."""
        self.drafted: dict[int, int] = {}
        """Passes over trees since a plain one was timed, by `octave` of the rows."""
        self.steps = 0
        """Passes that were timed."""

    def add(self, part: Hashable, rows: int, size: int, seconds: float) -> None:
        """Record the time of a part of a step, CPU overhead included."""
        if part == PASS:
            self.steps += 1
            self.drafted[octave(rows)] = 0 if size == 1 else self.drafted.get(octave(rows), 0) + 1
        known = self.times.setdefault((part, rows), {})
        if known.setdefault(size, RecentTimes()).add(seconds, self.steps) and part == PASS:
            self.times = {(PASS, rows): {size: known[size]}}
        elif part != PASS or size > 1:
            plain = 1 if part == PASS else None
            for old in [other for other, times in known.items() if other != plain and self.steps - times.step > INTERVAL]:
                del known[old]

    def plain_due(self, rows: int) -> bool:
        """True if a plain step is to be timed: after the first trees where nothing is known, and now and then where drafts pay."""
        first = not self.tree_due(rows) and self._timed(rows, plain=True) < FIRST_STEPS
        return first or self.drafted.get(octave(rows), 0) >= INTERVAL

    def tree_due(self, rows: int) -> bool:
        """True if a tree is to be timed, of up to `FIRST_NODES` nodes."""
        return self._timed(rows, plain=False) < FIRST_STEPS

    def _timed(self, rows: int, plain: bool) -> int:
        """The number of plain steps, or of trees, that were timed for about that many rows."""
        return sum(len(times.times) for r in self._near(PASS, rows) for n, times in self.times[PASS, r].items() if (n == 1) == plain)

    def _near(self, part: Hashable, rows: int) -> list[int]:
        """The numbers of rows for which a part was timed that are about as many, the nearest first."""
        near = [r for name, r in self.times if name == part and octave(r) == octave(rows)]
        return sorted(near, key=lambda r: (abs(r - rows), r))

    def of_part(self, part: Hashable, rows: int, size: int) -> float | None:
        """Seconds of a part of a step by those of other sizes and of about that many rows; None until one was timed."""
        near = self._near(part, rows)
        if not near:
            return None
        curve = [(0, 0.0), *sorted((n, times.seconds) for n, times in self.times[part, near[0]].items())]
        largest, seconds = curve[-1]
        least = seconds * (1 + LEAST_GROWTH * (size / largest - 1)) if size > largest else 0.0  # the slope may be noise
        i = min(max(bisect_left(curve, (size, 0.0)), 1), len(curve) - 1)
        (low, before), (high, after) = curve[i - 1], curve[i]
        return max(before + (after - before) * (size - low) / (high - low), least)

    def of_pass(self, rows: int, nodes: int) -> float:
        """Seconds of a pass over that many nodes per row."""
        return self.of_passes(rows, [nodes])[nodes]

    def of_passes(self, rows: int, sizes: Sequence[int]) -> dict[int, float]:
        """Seconds of passes over so many nodes per row, each at most the measured time of any larger pass."""
        known, found = self.times.get((PASS, rows), {}), dict[int, float]()
        measured = {size: times.seconds for size, times in known.items() if size == 1 or len(times.times) > 1}
        alike = [self.times[PASS, r][1].seconds for r in self._near(PASS, rows) if 1 in self.times[PASS, r]]
        line = (0.0, 0.0, 0.0) if alike and all(size == 1 or size in measured for size in sizes) else self._line()  # which takes time
        plain = alike[0] if alike else line[0] + line[1] * rows
        often = [(n, times.seconds) for n, times in known.items() if len(times.times) >= MIN_TIMES]
        for size in sizes:
            estimate = plain if size == 1 else max(line[0] + line[1] * rows * size, line[2])
            found[size] = min([max(measured.get(size, estimate), plain), *(s for n, s in often if n >= size)])
        return found

    def _line(self) -> tuple[float, float, float]:
        """A line fitted to all times by positions, that is rows times nodes, which determine the cost: its value at none, its slope, and
        the least to be believed of it, since it may fall below zero."""
        passes = [(r * n, times) for (part, r), known in self.times.items() if part == PASS for n, times in known.items()]
        timed = [(p, times.seconds, len(times.times)) for p, times in passes] or [(1, DEFAULT_SECONDS, 1)]
        often = [point for point in timed if point[2] >= MIN_TIMES]
        points = often if len({p for p, _, _ in often}) > 1 else timed
        weight = sum(w for _, _, w in points)
        mean_p, mean_s = sum(w * p for p, _, w in points) / weight, sum(w * s for _, s, w in points) / weight
        spread = sum(w * (p - mean_p) ** 2 for p, _, w in points)
        slope = DEFAULT_SLOPE * mean_s if not spread else max(sum(w * (p - mean_p) * (s - mean_s) for p, s, w in points) / spread, 0.0)
        return mean_s - slope * mean_p, slope, min(s for _, s, _ in points) / 2


class CostModel:
    """Costs by context length (attention costs nodes times context), in buckets of doubling size, and by how passes are made."""

    def __init__(self) -> None:
        self.timed: dict[str, dict[int, Costs]] = {}

    def at(self, context: int, made: str = "") -> Costs:
        """The costs at that context length; initially those of the nearest known length. ``made``: see `Captured.made`."""
        bucket, timed = (max(context, MIN_CONTEXT) - 1).bit_length(), self.timed.setdefault(made, {})
        if bucket not in timed:
            nearest = min(timed, key=lambda other: (abs(other - bucket), other), default=None)
            timed[bucket] = Costs()
            for key, known in timed[nearest].times.items() if nearest is not None else ():
                timed[bucket].times[key] = {size: RecentTimes([times.seconds] * FIRST_STEPS) for size, times in known.items()}
        return timed[bucket]
