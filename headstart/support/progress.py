"""Progress on standard error of whatever takes more than a few seconds."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
FILE_SECONDS = 5.0
"""Seconds between two states of a bar that is written to a file or pipe."""


def progress(what: str, unit: str, total: int | None, shown: bool = True) -> tqdm:
    """Return a progress bar, which the caller updates and closes; ``shown`` False: one that writes nothing."""
    terminal = sys.stderr.isatty()
    return tqdm(
        desc=what, unit=unit, total=total, unit_scale=unit == "token", disable=not shown, leave=not terminal, dynamic_ncols=terminal,
        mininterval=0.1 if terminal else FILE_SECONDS,
    )  # fmt: skip


def watched(items: Iterable[Item], what: str, unit: str) -> Iterator[Item]:
    """Yield the items, beside a bar of how many the caller is done with."""
    with progress(what, unit, len(items) if isinstance(items, Sized) else None) as bar:
        for item in items:
            yield item
            bar.update()
