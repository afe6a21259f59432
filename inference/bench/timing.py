"""Timing: functions are timed once they are no longer captured, and what other programs took of the processors meanwhile."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import psutil
import torch

from headstart.inference.capture.stopwatch import Stopwatch

WARM_UP, LONGEST_WARM_UP = 40, 240
"""Forward passes before timing starts: the minimum, and the maximum while functions are still captured."""


class OtherPrograms:
    """Within its context, the processors' time that other programs take; ``processors``: how many they keep busy, a mean."""

    processors = 0.0

    def __enter__(self) -> Self:
        self._before = time.monotonic(), self._taken()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        start, taken = self._before
        self.processors = max(self._taken() - taken, 0.0) / max(time.monotonic() - start, 1e-3)

    @staticmethod
    def _taken() -> float:
        whole = psutil.cpu_times()._asdict()
        idle = sum(whole.get(key, 0.0) for key in ("idle", "iowait", "guest", "guest_nice"))  # guests are counted as user too
        return sum(whole.values()) - idle - sum(os.times()[:4])


@torch.no_grad()
def median_seconds(work: Callable[[], object], repeats: int, cold: bool, device: torch.device) -> float:
    """The median time of ``work``, which makes one forward pass. ``cold``: it may not be captured yet."""
    for passes in range(1, LONGEST_WARM_UP + 1):
        with Stopwatch() as watch:
            work()
        if passes >= (WARM_UP if cold else 2) and watch.valid:
            break
    times = []
    for _ in range(repeats):
        with Stopwatch(device) as watch:
            work()
        times.append(watch.seconds)
    return statistics.median(times)
