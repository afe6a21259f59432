"""Handle SIGINT and SIGTERM as requests to stop after the current step; a second signal acts immediately."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Context in which the first signal is only recorded."""

    def __init__(self) -> None:
        self.number = int(signal.SIGTERM)
        """The received signal; SIGTERM if only another process received one."""
        self.received = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():   # only the main thread may set handlers
            self._before = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.number, self.received = number, True
        self._restore()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
