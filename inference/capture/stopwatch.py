"""A stopwatch that is invalidated by captures: a time that includes capturing or comparing a function does not predict the next one."""

from __future__ import annotations

import time
from contextvars import ContextVar
from types import TracebackType

import torch

_running: ContextVar[tuple[Stopwatch, ...]] = ContextVar("running stopwatches", default=())


class Stopwatch:
    """Measures the seconds of a ``with`` block. Stopwatches nest; a capture invalidates all that are running.

    with Stopwatch() as watch:
        verify()
    if watch.valid:
        costs.add(watch.seconds)

    ``device``: an accelerator that is waited for at the beginning, at each lap and at the end, which costs speed.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds = 0.0
        self._synchronize = torch.accelerator.synchronize if device is not None and device.type != "cpu" else None
        self.valid = True
        """False if a function was captured, or compared with its capture, during the block."""

    def __enter__(self) -> Stopwatch:
        self._outer = _running.set((*_running.get(), self))
        self._start = self._last = self._now()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds = self._now() - self._start
        _running.reset(self._outer)

    def lap(self) -> float:
        """Seconds since the last lap, or since the beginning."""
        before, self._last = self._last, self._now()
        return self._last - before

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


def void_running() -> None:
    """Mark every running stopwatch as not valid; called when a function is captured or compared."""
    for watch in _running.get():
        watch.valid = False
