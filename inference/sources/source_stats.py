"""Does a source of drafts pay? The tokens it adds against the time it takes, and back-off for sources that do not.

Since the output never depends on the tree, every source can be judged by every verified path, whichever source drafted it.
"""

from __future__ import annotations

from dataclasses import dataclass

TRIAL_PASSES, RETRIAL_PASSES = 8, 3
"""Passes before a source is judged, at first and after a back-off."""
MAX_TRIAL_LOSS = 2.0
"""Autoregressive steps' time that a trial may lose; with back-offs that double, useless heads cost little of even a short output."""
MIN_BACKOFF, MAX_BACKOFF = 16, 1024
"""Passes of a back-off, doubled each time the source fails again."""
TRIAL_SHARE = 0.01
"""The share of the time that the trials of all sources may lose."""
EMA_WEIGHT = 0.08
"""The weight of the last pass in the running averages."""


@dataclass
class SourceStats:
    """Running averages of the tokens per pass that only this source drafted, and of the seconds it costs."""

    credit: float = 0.0
    seconds: float = 0.0
    passes: int = 0
    """Since its trial began."""
    lost: float = 0.0
    """Seconds they took beyond what their tokens were worth."""
    paused: int = 0
    """Passes of the back-off still to go."""
    backoff: int = MIN_BACKOFF

    def active(self) -> bool:
        """True if it drafts in this pass; a paused source comes one pass nearer to its next trial."""
        if not self.paused:
            return True
        self.paused -= 1
        if not self.paused:
            self.passes, self.lost = 0, 0.0
        return False

    def note(self, credit: float, seconds: float, rate: float) -> None:
        """A pass in which it drafted; ``rate``: recent tokens per second."""
        self.passes += 1
        self.lost += seconds - credit / rate
        weight = max(EMA_WEIGHT, 1 / self.passes)
        self.credit += weight * (credit - self.credit)
        self.seconds += weight * (seconds - self.seconds)

    def loss(self, rate: float, step: float) -> float:
        """Seconds per pass that it costs beyond what it brings, at ``rate`` tokens per second; 0 during its trial.

        ``step``: seconds of an autoregressive step. A trial that has lost `MAX_TRIAL_LOSS` of them is over.
        """
        trial = TRIAL_PASSES if self.backoff == MIN_BACKOFF else RETRIAL_PASSES
        over = self.passes >= trial or self.lost > MAX_TRIAL_LOSS * step
        return self.seconds - self.credit / rate if over else 0.0

    def fail(self, step: float, sources: int) -> None:
        """Back off, longer than the last time, and until the trial's loss is this source's part of `TRIAL_SHARE` of that time."""
        self.paused = min(max(self.backoff, round(self.lost * sources / (TRIAL_SHARE * step))), MAX_BACKOFF)
        self.backoff = min(2 * self.backoff, MAX_BACKOFF)

    def succeed(self) -> None:
        """It pays, and has for as long as a first trial: the next back-off is a short one again."""
        if self.passes >= TRIAL_PASSES:
            self.backoff = MIN_BACKOFF
