"""What was drafted for a pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from headstart.inference.engine.tree import Pool

SLOWEST = 4
"""The power mean by which the passes left of a batch are taken from those of its rows: 1 their mean, without end the slowest row's."""


@dataclass
class Draft:
    """What was drafted for a pass: a pool a row, and what it took."""

    pools: list[Pool]
    room: list[int]
    """How many tokens each row may still write beyond its root: no node lies deeper."""
    queued: bool = False
    """Whether other texts wait for the places of these."""
    calibrated: bool = True
    """Whether chances are what scores have been worth; else scores are taken at their word, the same each time."""
    seconds: dict[int, float] = field(default_factory=dict)
    """By source."""
    levels: dict[int, int] = field(default_factory=dict)
    """Depths drafted, by drafter."""

    def passes_left(self, tokens: list[float]) -> float:
        """How many passes are left, if each brings the rows so many tokens: while others wait for their places, by all tokens
        together, else by what the rows have still to write, the slowest above all, since it is they that a batch waits for."""
        if self.queued or len(tokens) == 1:
            return 1 / sum(tokens)
        return sum((max(room, 1) / own) ** SLOWEST for room, own in zip(self.room, tokens, strict=True)) ** (1 / SLOWEST)
