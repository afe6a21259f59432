"""What a source's drafts are worth: acceptance by score and depth over all texts, and how far the present text is off.

Three estimates, from slow to fast. A `Calibration` maps scores to probabilities by depth; it is kept in the checkpoint.
A text's `Offset` is added to the log-odds of every draft in it: texts differ more than depths do, so one number, learned
from all of a text's drafts, is right after a few steps (a logistic model with a random effect of the text). `Acceptance.levels` are the
acceptance rates by depth and rank of recent drafts, from which the next draft's are expected before it is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from headstart.inference.adaptive.calibration import Calibration
from headstart.inference.engine.tree import MAX_PROB, Pool

FIRST = 0.6
"""The acceptance rate of a depth before any draft of it."""
TEXT_SPREAD = 1.2
"""Standard deviation of a text's log-odds about those of the texts before; measured between tasks (LOG.md)."""
MEMORY = 64.0
"""Steps after which what was learned of a text counts for 1/e: it may turn to something else."""
FOLLOW = 0.04
"""Weight of a step's offset in the mean of the texts, from which the next text starts."""
DRAFTS = 0.1
"""Weight of the last draft in the acceptance rates by depth and rank."""
CAUTION = 0.3
"""Standard deviations of a text's offset by which drafts are expected to be worse than its mean says, before they are made."""
LEAST_INFORMATION = 0.1
"""Precision that a draft adds at least, however sure its outcome was."""
MOST_OFFSET = 6.0
"""Bound of an offset."""
STORED_DRAFTS = 3
"""Drafts that a stored mean counts as: here beams may be of another width."""
LEAST_MASS = 0.02
"""A level whose parents are reached with less says nothing of its acceptance rate."""


def shifted(prob: float, offset: float) -> float:
    """The probability whose log-odds are larger by the offset."""
    return 1 / (1 + (1 / max(prob, 1e-9) - 1) * math.exp(-offset)) if offset else prob


@dataclass
class Offset:
    """The log-odds by which a text's drafts are more likely than their scores say: mean and precision of a normal distribution."""

    mean: float
    precision: float = TEXT_SPREAD**-2

    def learn(self, prob: float, hit: bool) -> None:
        """Record that a draft of this probability was the pick, or was not (one step of Newton's method)."""
        self.precision += max(prob * (1 - prob), LEAST_INFORMATION)
        self.mean = min(max(self.mean + (hit - prob) / self.precision, -MOST_OFFSET), MOST_OFFSET)

    @property
    def low(self) -> float:
        """The mean less a part of the standard deviation: drafts that do not pay cost more than a few that are left out."""
        return self.mean - CAUTION / math.sqrt(self.precision)

    def fade(self) -> None:
        """Let a step pass."""
        self.precision += (TEXT_SPREAD**-2 - self.precision) / MEMORY


@dataclass
class Acceptance:
    """The estimates of one source, for greedy or for sampled decoding."""

    calibration: Calibration = field(default_factory=Calibration)
    levels: list[list[float]] = field(default_factory=list)
    """For each depth, the share of its parents' probability that its drafts have, by rank in the level, in a text of offset 0."""
    drafts: int = 0
    """Drafts of which `levels` is the mean."""
    mean: float = 0.0
    """The mean offset of recent texts."""
    texts: dict[int, Offset] = field(default_factory=dict)
    """Offsets by the numbers of the sequences being decoded."""

    def offset(self, sequence: int) -> Offset:
        """The offset of a sequence; of a new one the mean of those before."""
        return self.texts.setdefault(sequence, Offset(self.mean))

    def prob(self, sequence: int, depth: int, score: float) -> float:
        """The probability that a draft with this score is the pick, given that its parent is accepted."""
        return shifted(self.calibration.table(depth).prob(score), self.offset(sequence).mean)

    def expected(self, depths: int, sequences: Sequence[int]) -> list[list[float]]:
        """The path probabilities of the next draft's nodes, by depth, in a text such as the mean of these sequences.

        Depths that were never drafted are taken to be accepted as the last one that was.
        """
        offset = sum(self.offset(sequence).low for sequence in sequences) / max(len(sequences), 1)
        mass, levels = 1.0, []
        for depth in range(depths):
            level = self.levels[min(depth, len(self.levels) - 1)] if self.levels else [FIRST]
            total = sum(level)
            scale = mass * shifted(total, offset) / total if total else 0.0
            levels.append([scale * share for share in level])
            mass = sum(levels[-1])
        return levels

    def learn(self, pool: Pool, sequence: int, source: object, accepted: dict[int, int]) -> None:
        """Learn from a verified row. ``accepted``: the pick at each accepted node of the pool."""
        offset = self.offset(sequence)
        for proposal in pool.proposals:
            parent = pool.parents[proposal.node]
            if proposal.source is source and parent in accepted:
                depth, hit = pool.levels[parent], pool.tokens[proposal.node] == accepted[parent]
                offset.learn(min(self.prob(sequence, depth, proposal.score), MAX_PROB), hit)
                self.calibration.table(depth).learn(proposal.score, hit)
        self.mean += FOLLOW * (offset.mean - self.mean)

    def note(self, pool: Pool, source: object, depths: int) -> None:
        """Take a draft into the acceptance rates by depth and rank. ``depths``: how many were drafted."""
        paths, levels = {0: 1.0}, [list[float]() for _ in range(depths)]
        for proposal in pool.proposals:
            depth, above = pool.levels[proposal.node] - 1, paths.get(pool.parents[proposal.node])
            if proposal.source is source and above is not None and depth < depths:
                paths[proposal.node] = above * self.calibration.table(depth).prob(proposal.score)
                levels[depth].append(paths[proposal.node])
        mass, weight = 1.0, max(1 / (self.drafts + 1), DRAFTS)
        self.drafts += 1
        for depth, level in enumerate(levels):
            total = sum(level)
            self._take(depth, [prob * min(1 / mass, MAX_PROB / total) for prob in sorted(level, reverse=True)], weight)
            mass = min(total, MAX_PROB * mass)
            if mass < LEAST_MASS:
                break

    def _take(self, depth: int, level: list[float], weight: float) -> None:
        known = self.levels[depth] if depth < len(self.levels) else level
        self.levels[depth : depth + 1] = [[old + weight * (new - old) for old, new in zip_longest(known, level, fillvalue=0.0)]]

    def pass_by(self) -> None:
        """Let a step pass."""
        for offset in self.texts.values():
            offset.fade()

    def to_json(self) -> dict[str, Any]:
        """What holds for any text, as stored in a checkpoint; `from_json` is the inverse."""
        levels = [[round(share, 4) for share in level] for level in self.levels]
        return {"levels": levels, "calibration": self.calibration.to_json()}

    @staticmethod
    def from_json(stored: dict[str, Any]) -> Acceptance:
        """The inverse of `to_json`. Raises ValueError, TypeError or KeyError unless it is what that wrote."""
        levels = [[float(share) for share in level] for level in stored["levels"]]
        if not all(0 <= share <= 1 for level in levels for share in level):
            raise ValueError(f"acceptance rates lie between 0 and 1; got {str(levels)[:60]}")
        return Acceptance(Calibration.from_json(stored["calibration"]), levels, STORED_DRAFTS)
