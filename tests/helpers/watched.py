"""Calls of a method, noted while they are made as ever."""

from collections.abc import Callable
from typing import Any

import pytest


def watched(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """What ``note`` makes of the arguments of each call of ``owner``'s ``name``, before it is made; an error of ``note`` is the call's."""
    seen, real = [], getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        seen.append(note(*given, **named))
        return real(*given, **named)

    monkeypatch.setattr(owner, name, call)
    return seen
