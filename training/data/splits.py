"""The samples of a recipe: trained on and held out, with counts and a check."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.training.data.check import Check
from headstart.training.data.mix import Mix
from headstart.training.data.sample import Sample
from headstart.training.data.tokenise import Stats


@dataclass(frozen=True)
class Splits:
    train: list[Sample]
    eval: list[Sample]
    stats: Stats
    """Counts for the training rows."""
    mix: Mix | None = None
    """How an epoch draws from several datasets; None: each sample once."""
    check: Check | None = None
    """Whether the tokens are those of decoding; None without conversations."""
    kept: bool = False
    """Whether an earlier start has made them (training/data/kept.py)."""

    def __str__(self) -> str:
        return f"{self.stats}{'; tokens of an earlier start' if self.kept else ''}"
