"""The progress of ``headstart regenerate``: rows done, tokens per second, and the time left, from the first step on."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

from headstart.support.terminal import FILE_SECONDS
from headstart.training.regenerate.items import Item

TERMINAL_SECONDS = 0.5
"""Seconds between two states of the bar on a terminal."""
MANY = 100
"""Rows whose mean length says how long the others may be."""
FORM = "{desc}: {n_fmt} of {total_fmt} rows [{elapsed}{postfix}]"


class Progress:
    """``rows`` of the dataset, of which ``missing`` are to be answered with at most ``longest`` tokens for each answer."""

    def __init__(self, rows: int, missing: int, longest: int) -> None:
        self.bar = tqdm(desc="regenerating", total=rows, initial=rows - missing, bar_format=FORM, mininterval=0)
        self.interval = TERMINAL_SECONDS if sys.stderr.isatty() else FILE_SECONDS
        self.missing, self.longest = missing, longest
        self.tokens, self.done, self.start = 0, 0, time.perf_counter()
        self.of_done = 0
        """Tokens of the rows that are done."""
        self.shown = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._show()
        self.bar.close()

    def wrote(self, tokens: int) -> None:
        """Count tokens as they are written."""
        self.tokens += tokens
        self._show_now_and_then()

    def ended(self, item: Item) -> None:
        """Count a row that is done."""
        self.done, self.of_done = self.done + 1, self.of_done + item.tokens
        self.bar.n += 1
        self._show_now_and_then()

    def _show_now_and_then(self) -> None:
        if time.perf_counter() - self.shown > self.interval:
            self._show()

    def _show(self) -> None:
        seconds = time.perf_counter() - self.start
        rate = self.tokens / seconds
        self.bar.set_postfix_str(f"{rate:,.0f} tokens/s{self._left(rate)}")
        self.shown = time.perf_counter()

    def _left(self, rate: float) -> str:
        """The time left, by the mean row so far; before many have ended, which are short ones, by the greatest length of an answer."""
        if not rate or self.done == self.missing:
            return ""
        known = self.done >= min(MANY, self.missing / 2)
        left = (self.missing - self.done) * (self.of_done / self.done if known else self.longest) - (self.tokens - self.of_done)
        return f", {'' if known else 'up to '}{tqdm.format_interval(max(left, 0) / rate)} left"
