"""Timing loops: warm up until functions are no longer captured, then measure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from itertools import repeat

import torch

from headstart.inference.capture.stopwatch import Stopwatch

WARM_UP, LONGEST_WARM_UP = 40, 240
"""Forward passes before timing starts: the minimum, and the maximum while functions are still captured."""
QUIET, LONGEST_RACE_WARM_UP = 400, 2000
"""The same of a system that drafts: passes without a capture, and the maximum. Adaptive trees take new shapes for long."""
LONGEST_WAIT, WAITS = 600, 3
"""Seconds that a race waits in all for what is compiled beside (for layers alone half a minute), and how often: deeper drafts follow."""


def warm_up(rounds: Iterable[Callable[[], int]], at_least: int = WARM_UP, at_most: int = LONGEST_WARM_UP, quiet: int = 1) -> None:
    """Run rounds, each returning its forward passes, until ``at_most`` passes are made, or ``at_least`` and the last ``quiet`` of them
    captured nothing.
    """
    passes = since = 0
    for work in rounds:
        with Stopwatch() as watch:
            made = work()
        passes, since = passes + made, since + made if watch.valid else 0
        if passes >= at_most or (passes >= at_least and since >= quiet):
            return


def wait(waiting: Callable[[], bool], note: Callable[[], object], seconds: float = LONGEST_WAIT) -> float:
    """Wait as long as something is being compiled beside, at most so long; returns the seconds that it took."""
    start = time.monotonic()
    while waiting() and (passed := time.monotonic() - start) < seconds:
        note()
        time.sleep(min(0.5, seconds - passed))
    return time.monotonic() - start


@torch.no_grad()
def median_seconds(work: Callable[[], object], repeats: int, cold: bool, device: torch.device) -> float:
    """The median time of ``work``, which makes one forward pass. ``cold``: it may not be captured yet."""

    def once() -> int:
        work()
        return 1

    warm_up(repeat(once), at_least=WARM_UP if cold else 2)
    times = []
    for _ in range(repeats):
        with Stopwatch(device) as watch:
            work()
        times.append(watch.seconds)
    return statistics.median(times)
