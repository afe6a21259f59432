"""How many drafts of each depth a beam search pass should verify, learned while decoding.

A pass makes one more step at each depth whose drafts include all the beams of the next step. Drafts of a depth are ranked by the score
of the whole sequence; a step needs the rank of the last of its new beams. With P_d(w) the probability that the first w drafts of depth d
suffice, verifying w_d of them at each depth adds ``P_0(w_0) (1 + P_1(w_1) (1 + ...))`` expected steps to the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNITS = 36
"""The most drafts that are verified, in units of half the beams."""
DEPTHS = 12
"""The most depths that are drafted."""
PRIOR, MISSES, DEEPER = 2.0, 1.2, 0.8
"""The prior counts as so many steps: w drafts suffice with probability 1 - MISSES beams / w, times DEEPER for each further depth."""
DECAY = 0.995
"""Decay of the counts per pass, so that depths that were left out are retried."""


@dataclass(frozen=True)
class Plan:
    """``widths``: how many drafts of each depth are verified; ``steps``: how many steps they are expected to add."""

    widths: tuple[int, ...]
    steps: float


class Breadth:
    """The counts for one number of beams."""

    def __init__(self, beams: int) -> None:
        self.beams = beams
        self.unit = max(1, beams // 2)
        self.widths = self.unit * np.arange(UNITS + 1)
        prior = PRIOR * (1 - MISSES * beams / np.maximum(self.widths, 1)).clip(min=0)
        self.hits = np.stack([prior * DEEPER**depth for depth in range(DEPTHS)])
        """For each depth and width, how often that width sufficed."""
        self.prior = self.hits.copy()
        self.seen = np.zeros(DEPTHS)
        """Steps counted at each depth."""

    def learn(self, depth: int, need: int | None) -> None:
        """A step needed the first ``need`` drafts of that depth; None: all of them did not suffice."""
        self.seen[depth] += 1
        if need is not None:
            self.hits[depth] += self.widths >= need

    def fade(self) -> None:
        """Let the counts decay, once per pass."""
        self.hits = self.prior + DECAY * (self.hits - self.prior)
        self.seen *= DECAY

    def plans(self, depths: int) -> list[Plan]:
        """The best plan of at most so many units, for 0, 1, .. `UNITS` of them, and at most ``depths`` depths."""
        probs = self.hits / (PRIOR + self.seen[:, None])
        remaining = np.subtract.outer(np.arange(UNITS + 1), np.arange(UNITS + 1))   # units left of so many when so many are taken
        steps = np.zeros(UNITS + 1)
        choices: list[np.ndarray] = []
        for depth in reversed(range(min(depths, DEPTHS))):
            values = np.where(remaining >= 0, probs[depth] * (1 + steps[remaining.clip(min=0)]), -1.0)
            choices.append(values.argmax(1))
            steps = values.max(1)
        return [Plan(self._follow(choices[::-1], units), float(steps[units])) for units in range(UNITS + 1)]

    def _follow(self, choices: list[np.ndarray], units: int) -> tuple[int, ...]:
        widths: list[int] = []
        for choice in choices:
            taken = int(choice[units])
            if not taken:
                break
            widths.append(taken * self.unit)
            units -= taken
        return tuple(widths)
