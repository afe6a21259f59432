"""What other programs take of the processors while something is measured."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Self

import psutil


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
