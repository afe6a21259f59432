"""Whether a source of drafts pays: what it brings against what it takes, and rests for those that do not.

Since the text never depends on the tree, every source can be judged by every verified path, whoever's drafts were read.
"""

from __future__ import annotations

from dataclasses import dataclass

TRIAL, RETRIAL = 8, 3
"""Passes before a source is judged, at first and after a rest."""
PATIENCE = 2.0
"""Plain steps' time that a trial may lose; with rests that double, useless heads cost little of even a short text."""
REST, LONGEST_REST = 16, 1024
"""Passes a source rests for, at least, doubled each time it fails again."""
LITTLE = 0.01
"""The share of the time that the trials of all sources may lose."""
NEW = 0.08
"""The weight of the last pass in the running averages."""


@dataclass
class SourceStats:
    """One source: running averages of the tokens a pass owes to it alone, and of the seconds it costs."""

    credit: float = 0.0
    seconds: float = 0.0
    passes: int = 0
    """Since it was last judged afresh."""
    lost: float = 0.0
    """Seconds those took beyond what they brought, so far."""
    resting: int = 0
    """Passes still to rest."""
    rest: int = REST

    def active(self) -> bool:
        """Whether it drafts in this pass; a resting source comes one pass nearer to its next trial."""
        if not self.resting:
            return True
        self.resting -= 1
        if not self.resting:
            self.passes, self.lost = 0, 0.0
        return False

    def note(self, credit: float, seconds: float, rate: float) -> None:
        """A pass in which it drafted; ``rate``: tokens a second of late."""
        self.passes += 1
        self.lost += seconds - credit / rate
        new = max(NEW, 1 / self.passes)
        self.credit += new * (credit - self.credit)
        self.seconds += new * (seconds - self.seconds)

    def loss(self, rate: float, step: float) -> float:
        """Seconds a pass that it costs beyond what it brings, at ``rate`` tokens a second; 0 before its trial is over.

        ``step``: seconds of a plain step. A trial that has lost `PATIENCE` of them is over.
        """
        trial = TRIAL if self.rest == REST else RETRIAL
        over = self.passes >= trial or self.lost > PATIENCE * step
        return self.seconds - self.credit / rate if over else 0.0

    def fail(self, step: float, sources: int) -> None:
        """It does not pay: let it rest, longer than the last time, and until what it has lost is its part of `LITTLE` of that time."""
        self.resting = min(max(self.rest, round(self.lost * sources / (LITTLE * step))), LONGEST_REST)
        self.rest = min(2 * self.rest, LONGEST_REST)

    def prove(self) -> None:
        """It pays, and has for as long as a first trial: the next rest is a short one again."""
        if self.passes >= TRIAL:
            self.rest = REST
