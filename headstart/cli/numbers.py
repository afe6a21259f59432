"""Numbers on the command line, within their limits."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from headstart.support.limits import (
    MAX_BATCH,
    MAX_DEPTH,
    MAX_NODES,
    MAX_SEED,
    MAX_WIDTH,
    TEMPERATURES,
    is_temperature,
    max_threads,
)  # fmt: skip

MAX_COUNT = (1 << 63) - 1


def count(least: int, most: int = MAX_COUNT) -> Callable[[str], int]:
    """Return a parser of integers from ``least`` to ``most``."""

    def read(text: str) -> int:
        digits = text if text.isascii() and text.isdecimal() and len(text) < 20 else "-1"
        if not least <= int(digits) <= most:
            upper = "" if most == MAX_COUNT else f" and at most {most}"
            raise argparse.ArgumentTypeError(f"a whole number of at least {least}{upper} is needed; got {text[:40]!r}")
        return int(text)

    return read


def number(least: float, most: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """Return a parser of numbers from ``least`` (exclusive with ``above``) to ``most``."""

    def read(text: str) -> float:
        value = _float(text)
        if not (least < value if above else least <= value) or not value <= most or math.isinf(value):
            span = f"{'above' if above else 'from'} {least:g}" + ("" if math.isinf(most) else f" to {most:g}")
            raise argparse.ArgumentTypeError(f"a number {span} is needed; got {text[:40]!r}")
        return value

    return read


def temperature(text: str) -> float:
    """Parse a temperature."""
    if not is_temperature(value := _float(text)):
        raise argparse.ArgumentTypeError(f"a temperature is {TEMPERATURES}; got {text[:40]!r}")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


BATCH, NODES, WIDTH, DEPTH = count(1, MAX_BATCH), count(1, MAX_NODES), count(1, MAX_WIDTH), count(1, MAX_DEPTH)
THREADS, SEED = count(1, max_threads()), count(0, MAX_SEED)
TUNED_NODES = count(2, MAX_NODES)
