"""Compares the tokens that a source of drafts adds with the time it takes, and backs off sources that slow decoding down.

Since the output never depends on the tree, every verified path serves to judge every source, regardless of which source drafted it.
A source has a balance of the time it saved minus the time it lost, in autoregressive steps. It starts with enough for a short trial and
is bounded above, so that a source that has paid for long backs off soon after it stops paying, but not after a few unlucky passes. A
trial ends when it has lost more than chance explains: useless drafts lose about the same in every pass, useful ones do not.
Heads that pay for one row may not for eight, so balances are kept by `octave` of the number of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

TRIAL_STEPS = 3.0
"""Balance at the beginning of a trial: heads of no value lose about this much time before they back off."""
MAX_BALANCE = 24.0
"""Upper bound of the balance. Accepted tokens per pass vary by about one step's worth, so a smaller bound pauses sources that gain 20 %."""
MIN_BALANCE = 1.0
"""Lower bound of the balance of the other sources when one backs off: from then on they may be credited with its tokens."""
MAX_PASS_LOSS = 2.0
"""Time that one pass can lose: another program may have delayed it."""
MIN_BACKOFF, MAX_BACKOFF = 16, 1024
"""Length of a back-off in passes, doubled each time a trial fails again."""
RATE_WEIGHT = 0.08
"""Weight of the last pass in the average rate without a source."""
TRIAL_SHARE = 0.01
"""Fraction of the decoding time that the trials of all sources may lose."""


@dataclass
class Spread:
    """The standard deviation of a sum of numbers that vary at random, updated with each number (Welford)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, number: float) -> None:
        self.count += 1
        off = number - self.mean
        self.mean += off / self.count
        self.squares += off * (number - self.mean)

    @property
    def of_sum(self) -> float:
        """The standard deviation of the sum."""
        return math.sqrt(self.squares)


@dataclass
class SourceStats:
    """The balance of one source and its back-off."""

    balance: float = TRIAL_STEPS
    trial: Spread | None = field(default_factory=Spread)
    """The passes of a trial; None once the balance has doubled, which proves the source."""
    paused: int = 0
    """Remaining passes of the back-off."""
    backoff: int = MIN_BACKOFF
    without: float = 0.0
    """Tokens per second of passes without the source, a running geometric mean; 0: not known."""

    def active(self) -> bool:
        """True if the source drafts in this pass; otherwise its back-off is shortened by one pass."""
        if not self.paused:
            return True
        self.paused -= 1
        return False

    def rate_without(self, tokens: float, seconds: float, rows: int, step: float) -> float:
        """Recent tokens per second that decoding would have had without the source: at first, autoregressive decoding's.

        ``tokens``, ``seconds``: of this pass, without what the source added to either. ``step``: seconds of a pass over one node per row.
        The mean is geometric: a pass that other sources fill with tokens, as where a text repeats itself, says little of the next ones.
        """
        before = self.without or rows / step
        # Any pass writes a token; estimates of what the source added may say less, since they come of noisy times and weights.
        self.without = before * (max(tokens, 1.0) / max(seconds, step) / before) ** RATE_WEIGHT
        return self.without

    def note(self, gain: float) -> None:
        """Record a pass in which the source drafted. ``gain``: the value of its tokens minus its time, in autoregressive steps."""
        gain = max(gain, -MAX_PASS_LOSS)
        self.balance = min(self.balance + gain, MAX_BALANCE)
        if self.balance >= 2 * TRIAL_STEPS:
            self.trial, self.backoff = None, MIN_BACKOFF
        elif self.trial is not None:
            self.trial.add(gain)

    @property
    def proved(self) -> bool:
        """True if the source has gained as much as a trial may lose."""
        return self.trial is None

    @property
    def standing(self) -> float:
        """The balance, during a trial plus what it may have lost by chance; below 0, the source slows decoding down."""
        return self.balance + (self.trial.of_sum if self.trial is not None else 0.0)

    def back_off(self, sources: int) -> None:
        """Pause, and begin a trial afterwards.

        The pause is short for a source that has proved itself. Otherwise it is longer than the last time, and so long that the trial
        lost at most this source's part of `TRIAL_SHARE` of the time; ``sources``: the number that drafted.
        """
        lost = 0.0 if self.trial is None else (TRIAL_STEPS - self.balance) * sources
        self.paused = min(max(self.backoff, round(lost / TRIAL_SHARE)), MAX_BACKOFF)
        self.backoff = min(2 * self.backoff, MAX_BACKOFF)
        self.balance, self.trial = TRIAL_STEPS, Spread()
