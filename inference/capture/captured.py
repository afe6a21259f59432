"""A function that is made by compiled code where there is some, is replayed from its captures, or runs itself.

A time that includes capturing or comparing a function does not predict the next one: captures invalidate every `Stopwatch` that runs.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Hashable
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch

from headstart.inference.capture.plugin import Backend, Call, Capture, Compiled, Function, is_out_of_memory
from headstart.support.errors import waiting

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


PATIENCE = 24
"""Calls of a function before ``auto`` captures it; capturing takes about as long as 30 calls."""
SHORT_PATIENCE = 3
"""The same once another function has been captured: decoding goes on for long, and sources are compared by their captured times."""
MOST_SHAPES = 4096
"""Exact shapes of a function that are remembered."""
logger = logging.getLogger(__name__)


class Captured:
    """``function(held, *inputs)`` -> a pytree of tensors; ``held`` and ``inputs`` are pytrees too."""

    def __init__(
        self, function: Function, name: str, backend: Backend | None, patience: int, fallback: str | None, compiled: Compiled | None = None
    ) -> None:
        self.function, self.name, self.backend, self._patience, self.compiled = function, name, backend, patience, compiled
        """``compiled`` takes the function's place where it has been compiled."""
        self.functions: list[Captured] = []
        """All functions of the capturer."""
        self.fallback = fallback
        """The reason why this function is not captured although a backend was chosen."""
        self.last_compiled = False
        """True if the last call was made by compiled code."""
        self.loads_kernels = False
        """True on an accelerator: the first call at new shapes loads kernels, so its time says nothing of later ones."""
        self.calls = 0
        self.captures_made = 0
        self._run: set[Hashable] = set()
        """Structures and shapes of the uncaptured calls so far, on an accelerator."""
        self._captures: dict[Hashable, Capture] = {}
        self._known: dict[Hashable, Capture] = {}
        """Captures by structure and exact shapes of earlier calls."""

    @property
    def any_captured(self) -> bool:
        """True once a function of the capturer has been captured."""
        return any(function.captures_made for function in self.functions)

    @property
    def patience(self) -> int:
        """Calls that run uncaptured."""
        return self._patience * SHORT_PATIENCE // PATIENCE if self.any_captured else self._patience

    @property
    def made(self) -> str:
        """How calls are made, "compiled", "captured" or "": their times are kept apart."""
        if self.compiled is not None and self.compiled.active:
            return "compiled"
        return "captured" if self.captures_made else ""

    @property
    def captured_by(self) -> str:
        """How calls are made: ``compile``, ``trace``, ``cuda-graph`` or ``off``."""
        made = {"compiled": "compile", "captured": self.backend.name if self.backend is not None else "off"}
        return made.get(self.made, "off")

    def __call__(self, held: Any, *inputs: Any) -> Any:
        found = None if self.compiled is None else self.compiled(held, *inputs)
        self.last_compiled = found is not None
        if found is not None:
            return found[0]
        self.calls += 1
        if self.backend is None or self.calls <= self.patience:
            if self.loads_kernels:
                call = Call.of(held, inputs)
                if (shapes := (call.structure, call.shapes)) not in self._run:
                    void_running()
                    self._run.add(shapes)
            if self.backend is not None and self.any_captured:  # slower than from the next calls on
                void_running()
            return self.function(held, *inputs)
        call = Call.of(held, inputs)
        exact = (call.structure, call.shapes, self.backend.layout(call))
        try:
            capture = self._known.get(exact)
            if capture is None:
                return self._at_new_shapes(exact, call, self.backend)
            capture.used = self.calls
            return capture(call)
        except Exception as error:  # may be the function's own error: running it again raises that
            if is_out_of_memory(error):
                raise
            self.fallback = f"not capturable by {self.backend.name}: {first_line(error)}"
            warn_once(f"{self.name} is {self.fallback}; it runs uncaptured, which is slower")
            self.drop()
            return self.function(held, *inputs)

    def _at_new_shapes(self, exact: Hashable, call: Call, backend: Backend) -> Any:
        """The result at new shapes: replay within the compared range, else compare, else capture again."""
        key = (call.structure, backend.variant(call))
        capture = self._captures.get(key)
        if capture is not None and capture.follows(call):
            if len(self._known) >= MOST_SHAPES:
                self._known = {}
            self._known[exact] = capture
            capture.used = self.calls
            return capture(call)
        void_running()
        if capture is not None and (expected := capture.compare(self.function, call)) is not None:
            return expected
        with waiting(f"capturing {self.name}"):
            capture = backend.capture(self.function, call)
        self._keep(key, capture)
        self.captures_made += 1
        capture.extend_range(call.shapes)
        return capture(call)

    def _keep(self, key: Hashable, capture: Capture) -> None:
        """Keep a capture in place of an earlier one of its key or, if there are too many, of the one not used for longest."""
        dropped = self._captures.pop(key, None)
        assert self.backend is not None
        if dropped is None and len(self._captures) >= self.backend.most_captures:
            dropped = self._captures.pop(min(self._captures, key=lambda other: self._captures[other].used))
        self._captures[key], capture.used = capture, self.calls
        self._known = {exact: known for exact, known in self._known.items() if known is not dropped}

    def drop(self) -> None:
        """Forget all captures and make no more."""
        self.backend = None
        self._captures, self._known = {}, {}


@functools.cache
def warn_once(message: str) -> None:
    """Log a line, once in this process."""
    logger.warning(message)


def first_line(error: Exception) -> str:
    """The error's type and the most informative line of its message: TorchScript's last ``RuntimeError:`` line, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in reversed(lines) if line.startswith("RuntimeError: ")), lines[0] if lines else "")
    return f"{type(error).__name__}: {text.removeprefix('RuntimeError: ')[:160]}"
