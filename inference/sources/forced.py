"""Drafts the tokens that a grammar forces: keys, quotes and braces of a JSON schema, the literals of a regular expression.

Only a draft: a forced string has several tokenisations, and the pick decides.
"""

from __future__ import annotations

import math

from headstart.inference.engine.texts import Texts
from headstart.inference.sources.proposer import Candidates, Proposer

SCORE = math.log(0.95)
"""The log-probability that a forced token is picked, before any was."""


class ForcedProposer(Proposer):
    """Asks the processors of a call (see `forked`). ``texts``: those of the call, set for each."""

    name = "forced"

    def __init__(self) -> None:
        self.texts: Texts

    def open(self, sequence: int, tokens: list[int]) -> None:
        """Texts are read from the call."""

    def extend(self, sequence: int, tokens: list[int]) -> None:
        """Texts are read from the call."""

    def propose(self, sequence: int, depths: int, nodes: int) -> Candidates:
        forked = self.texts.request.processing.forked[sequence].values()
        asked, ids_1T = [one.forced for one in forked if one.forced is not None], self.texts.of[sequence].ids_T[None]
        tokens = min((forced(ids_1T) for forced in asked), key=len, default=[])[: min(depths, nodes)]
        return Candidates(tokens, list(range(-1, len(tokens) - 1)), [SCORE] * len(tokens))
