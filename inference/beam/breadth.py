"""How many drafts of a depth beam search must read to go on there, learned as it decodes, and how many are worth reading.

A pass goes one step further at each depth whose drafts hold all the beams of the next step. Drafts of a depth are ranked by the score
of the whole text; what a step needs is the rank of the last of its new beams. With P_d(w) the chance that the w first drafts of depth d
suffice, w_d of them read at each depth bring ``P_1(w_1) (1 + P_2(w_2) (1 + ...))`` steps beyond the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNITS = 36
"""The most drafts that are read, in units of half the beams."""
DEPTHS = 12
"""The most depths that are thought of."""
PRIOR, MISSES, DEEPER = 2.0, 1.2, 0.8
"""Before anything is known, as of so many steps: of w drafts 1 - MISSES beams / w suffice, and of each depth DEEPER of the one before."""
FADE = 0.995
"""What is left of all that was learned after another pass, so that what once did not pay is tried again."""


@dataclass(frozen=True)
class Plan:
    """``widths``: how many drafts of each depth are read; ``steps``: what they are expected to bring beyond the first."""

    widths: tuple[int, ...]
    steps: float


class Breadth:
    """What was learned for one number of beams."""

    def __init__(self, beams: int) -> None:
        self.beams = beams
        self.unit = max(1, beams // 2)
        self.widths = self.unit * np.arange(UNITS + 1)
        prior = PRIOR * (1 - MISSES * beams / np.maximum(self.widths, 1)).clip(min=0)
        self.hits = np.stack([prior * DEEPER**depth for depth in range(DEPTHS)])
        """For each depth and width, how often that width sufficed."""
        self.prior = self.hits.copy()
        self.seen = np.zeros(DEPTHS)
        """Steps that this was learned of, at each depth."""

    def learn(self, depth: int, need: int | None) -> None:
        """A step needed the first ``need`` drafts of that depth (from 0); None: all of them did not suffice."""
        self.seen[depth] += 1
        if need is not None:
            self.hits[depth] += self.widths >= need

    def fade(self) -> None:
        """Another pass is over."""
        self.hits = self.prior + FADE * (self.hits - self.prior)
        self.seen *= FADE

    def plans(self, depths: int) -> list[Plan]:
        """The best plan of at most so many units, for 0, 1, .. `UNITS` of them, and at most ``depths`` depths."""
        chances = self.hits / (PRIOR + self.seen[:, None])
        left = np.subtract.outer(np.arange(UNITS + 1), np.arange(UNITS + 1))   # what is left of so many units when so many are taken
        steps = np.zeros(UNITS + 1)
        choices: list[np.ndarray] = []
        for depth in reversed(range(min(depths, DEPTHS))):
            values = np.where(left >= 0, chances[depth] * (1 + steps[left.clip(min=0)]), -1.0)
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
