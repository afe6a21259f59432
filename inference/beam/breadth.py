"""Chooses how many drafts of each depth a beam search pass verifies, from statistics gathered while decoding.

A pass makes one more step at each depth whose verified drafts include all beams of the next step. The drafts of a depth are ranked by the
score of the whole sequence, and a step needs all drafts up to the lowest-ranked of its new beams. With P_d(w) the probability that the
first w drafts of depth d suffice, verifying w_d drafts at each depth adds ``P_0(w_0) (1 + P_1(w_1) (1 + ...))`` expected steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNITS = 36
"""Maximum number of drafts verified, in units of half the number of beams."""
DEPTHS = 12
"""Maximum number of depths drafted."""
PRIOR, MISSES, DEEPER = 2.0, 1.2, 0.8
"""A prior worth ``PRIOR`` steps: w drafts suffice with probability 1 - MISSES beams / w, times DEEPER for each further depth."""
DECAY = 0.995
"""Decay of the counts per pass, so that depths that were not drafted are retried."""


@dataclass(frozen=True)
class Plan:
    """``widths``: drafts verified at each depth; ``steps``: steps they are expected to add."""

    widths: tuple[int, ...]
    steps: float


class Breadth:
    """The statistics for one number of beams."""

    def __init__(self, beams: int) -> None:
        self.beams = beams
        self.unit = max(1, beams // 2)
        self.widths = self.unit * np.arange(UNITS + 1)
        prior = PRIOR * (1 - MISSES * beams / np.maximum(self.widths, 1)).clip(min=0)
        self.hits = np.stack([prior * DEEPER**depth for depth in range(DEPTHS)])
        """How often each width sufficed, by depth and width."""
        self.prior = self.hits.copy()
        self.seen = np.zeros(DEPTHS)
        """Steps counted at each depth."""

    def learn(self, depth: int, need: int | None) -> None:
        """Record that a step needed the first ``need`` drafts of that depth; None: all of them did not suffice."""
        self.seen[depth] += 1
        if need is not None:
            self.hits[depth] += self.widths >= need

    def fade(self) -> None:
        """Decay the counts; called once per pass."""
        self.hits = self.prior + DECAY * (self.hits - self.prior)
        self.seen *= DECAY

    def plans(self, depths: int) -> list[Plan]:
        """The best plan for each budget of 0, 1, ..., `UNITS` units, over at most ``depths`` depths."""
        probs = self.hits / (PRIOR + self.seen[:, None])
        remaining = np.subtract.outer(np.arange(UNITS + 1), np.arange(UNITS + 1))  # [units available, units taken]
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
