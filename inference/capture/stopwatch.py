"""A stopwatch that is invalidated by captures: a time that includes capturing or comparing a function does not predict the next one."""

from __future__ import annotations

import time
from contextvars import ContextVar
from types import TracebackType

_running: ContextVar[tuple[Stopwatch, ...]] = ContextVar("running stopwatches", default=())


class Stopwatch:
    """Measures the seconds of a ``with`` block. Stopwatches nest; a capture invalidates all that are running.

    with Stopwatch() as watch:
        verify()
    if watch.valid:
        costs.add(watch.seconds)
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.valid = True
        """False if a function was captured, or compared with its capture, during the block."""

    def __enter__(self) -> Stopwatch:
        self._outer = _running.set((*_running.get(), self))
        self._start = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._start
        _running.reset(self._outer)


def void_running() -> None:
    """Mark every running stopwatch as not valid; called when a function is captured or compared."""
    for watch in _running.get():
        watch.valid = False
