"""Compares the tokens that a source of drafts adds with the time it takes, and backs off sources that slow decoding down.

Since the output never depends on the tree, every verified path serves to judge every source, regardless of which source drafted it.
"""

from __future__ import annotations

from dataclasses import dataclass

TRIAL_PASSES, RETRIAL_PASSES = 8, 3
"""Length of a trial in passes, initially and after a back-off; a source is judged at its end."""
MAX_TRIAL_LOSS = 2.0
"""Time that a trial may lose, in autoregressive steps; with doubling back-offs, useless heads cost little even in a short output."""
MIN_BACKOFF, MAX_BACKOFF = 16, 1024
"""Length of a back-off in passes, doubled each time the source fails again."""
TRIAL_SHARE = 0.01
"""Fraction of the decoding time that the trials of all sources may lose."""
EMA_WEIGHT = 0.08
"""Weight of the last pass in the running averages."""


@dataclass
class SourceStats:
    """Running averages of the accepted tokens per pass that only this source drafted, and of its seconds per pass."""

    credit: float = 0.0
    seconds: float = 0.0
    passes: int = 0
    """Passes in which it drafted since its trial began."""
    lost: float = 0.0
    """Seconds that these passes took beyond the value of their tokens."""
    paused: int = 0
    """Remaining passes of the back-off."""
    backoff: int = MIN_BACKOFF

    def active(self) -> bool:
        """True if the source drafts in this pass; otherwise its back-off is shortened by one pass."""
        if not self.paused:
            return True
        self.paused -= 1
        if not self.paused:
            self.passes, self.lost = 0, 0.0
        return False

    def note(self, credit: float, seconds: float, rate: float) -> None:
        """Record a pass in which the source drafted; ``rate``: recent tokens per second."""
        self.passes += 1
        self.lost += seconds - credit / rate
        weight = max(EMA_WEIGHT, 1 / self.passes)
        self.credit += weight * (credit - self.credit)
        self.seconds += weight * (seconds - self.seconds)

    def loss(self, rate: float, step: float) -> float:
        """Seconds per pass that the source costs beyond the value of its tokens at ``rate`` tokens per second; 0 during its trial.

        ``step``: seconds of an autoregressive step. A trial that has lost more than `MAX_TRIAL_LOSS` steps ends early.
        """
        trial = TRIAL_PASSES if self.backoff == MIN_BACKOFF else RETRIAL_PASSES
        over = self.passes >= trial or self.lost > MAX_TRIAL_LOSS * step
        return self.seconds - self.credit / rate if over else 0.0

    def fail(self, step: float, sources: int) -> None:
        """Back off for longer than the last time, and until the trial's loss is at most this source's part of `TRIAL_SHARE` of the time."""
        self.paused = min(max(self.backoff, round(self.lost * sources / (TRIAL_SHARE * step))), MAX_BACKOFF)
        self.backoff = min(2 * self.backoff, MAX_BACKOFF)

    def succeed(self) -> None:
        """Reset the back-off length once the source has made decoding faster for as long as a first trial."""
        if self.passes >= TRIAL_PASSES:
            self.backoff = MIN_BACKOFF
