"""Marks parts of a function that are to be compiled as a `Region`; outside a trace nothing happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Mark = Callable[[], Callable[[], None]]
_mark: ContextVar[Mark | None] = ContextVar("marking regions", default=None)


@contextmanager
def region() -> Iterator[None]:
    """What is traced in this block is one region."""
    mark = _mark.get()
    leave: Any = None if mark is None else mark()
    yield
    if leave is not None:
        leave()


@contextmanager
def marking(mark: Mark) -> Iterator[None]:
    """Within this context `region` calls ``mark`` at its start, and what that returns at its end."""
    token = _mark.set(mark)
    try:
        yield
    finally:
        _mark.reset(token)
