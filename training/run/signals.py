"""SIGINT and SIGTERM as a request to stop after the current step; a second one acts at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

HEARD = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """While it is entered, the first signal is only noted."""

    def __init__(self) -> None:
        self.number = int(signal.SIGTERM)
        """Of the signal target_hidden; SIGTERM where another process target_hidden it."""
        self.received = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():   # Python delivers signals nowhere else
            self._before = {number: signal.signal(number, self._note) for number in HEARD}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number, self.received = number, True
        self._restore()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
