"""What the backbone has said before: after each token, the likeliest next ones of the last times it read that token.

Token recycling (2408.08696): a pass computes a distribution at every node and uses one token of it; the rest is kept, and from it
trees are grown. The paper keeps the last distribution and fills a fixed template; here the last few are mixed, and the tree is
grown by the product of chances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from headstart.inference.sources.best_first import grow
from headstart.inference.sources.proposer import Candidates, Proposer

TIMES = 3
"""Of how many of the last times a token was read something is kept."""
NEWEST = 0.5
"""The share of the newest time; the one before has as large a share of what is left, and so on. What nothing is known of keeps the
rest: what was seen once is believed half, which is about how often it is right."""

TopK = tuple[list[int], list[float]]
"""Likeliest next tokens and their log-probabilities, best first."""


class RecyclingProposer(Proposer):
    """One table for all rows, kept from text to text: it tells of the model, not of a text. Some 2 kB for each token read so far."""

    name = "recycling"
    watches = 8

    def __init__(self) -> None:
        self.table: dict[int, tuple[TopK, ...]] = {}
        """What was said after a token, newest first."""
        self.roots: dict[int, int] = {}

    def open(self, row: int, tokens: list[int]) -> None:
        self.roots[row] = tokens[-1]

    def extend(self, row: int, tokens: list[int]) -> None:
        self.roots[row] = tokens[-1]

    def see(self, tokens: list[int], likeliest: list[list[int]], logprobs: list[list[float]]) -> None:
        table = self.table
        for token, said in zip(tokens, zip(likeliest, logprobs, strict=True), strict=True):
            table[token] = (said, *table.get(token, ())[: TIMES - 1])

    def after(self, token: int, least: float) -> Iterator[tuple[int, float, int]]:
        """What may follow that token: tokens, their chances, and once more the tokens, after which it goes on."""
        chances: dict[int, float] = {}
        share = NEWEST
        for tokens, logprobs in self.table.get(token, ()):
            for following, logprob in zip(tokens, logprobs, strict=True):
                chance = share * math.exp(logprob)
                if chance < NEWEST * least:
                    break
                chances[following] = chances.get(following, 0.0) + chance
            share *= 1 - NEWEST
        return ((following, chance, following) for following, chance in chances.items())

    def propose(self, row: int, depth: int, nodes: int) -> Candidates:
        return grow(self.roots[row], self.after, depth, nodes)
