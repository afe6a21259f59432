"""Compares the tokens that a source of drafts adds with the time it takes, and backs off sources that slow decoding down.

Since the output never depends on the tree, every verified path serves to judge every source, regardless of which source drafted it.
A source has a balance of the time it saved minus the time it lost, in autoregressive steps. It starts with enough for a short trial and
is bounded above, so that a source that has paid for long backs off soon after it stops paying, but not after a few unlucky passes.
Heads that pay for one row may not for eight, so balances are kept by `octave` of the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class SourceStats:
    """The balance of one source and its back-off."""

    balance: float = TRIAL_STEPS
    proved: bool = False
    """True once the balance has doubled since the trial began."""
    paused: int = 0
    """Remaining passes of the back-off."""
    backoff: int = MIN_BACKOFF
    without: tuple[float, float] | None = None
    """Tokens and seconds of a pass without the source, running averages."""

    def active(self) -> bool:
        """True if the source drafts in this pass; otherwise its back-off is shortened by one pass."""
        if not self.paused:
            return True
        self.paused -= 1
        return False

    def rate_without(self, tokens: float, seconds: float, rows: int, step: float) -> float:
        """Recent tokens per second that decoding would have had without the source: at first, autoregressive decoding's.

        ``tokens``, ``seconds``: of this pass, without what the source added to either. ``step``: seconds of a pass over one node per row.
        """
        before_tokens, before_seconds = self.without or (float(rows), step)
        self.without = before_tokens + RATE_WEIGHT * (tokens - before_tokens), before_seconds + RATE_WEIGHT * (seconds - before_seconds)
        return self.without[0] / self.without[1]

    def note(self, gain: float) -> None:
        """Record a pass in which the source drafted. ``gain``: the value of its tokens minus its time, in autoregressive steps."""
        self.balance = min(self.balance + max(gain, -MAX_PASS_LOSS), MAX_BALANCE)
        if self.balance >= 2 * TRIAL_STEPS:
            self.proved, self.backoff = True, MIN_BACKOFF

    def back_off(self, sources: int) -> None:
        """Pause, and begin a trial afterwards.

        The pause is short for a source that has proved itself. Otherwise it is longer than the last time, and so long that the trial
        lost at most this source's part of `TRIAL_SHARE` of the time; ``sources``: the number that drafted.
        """
        lost = 0.0 if self.proved else (TRIAL_STEPS - self.balance) * sources
        self.paused = min(max(self.backoff, round(lost / TRIAL_SHARE)), MAX_BACKOFF)
        self.backoff = min(2 * self.backoff, MAX_BACKOFF)
        self.balance, self.proved = TRIAL_STEPS, False
