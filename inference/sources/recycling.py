"""Token recycling (2408.08696): drafts from the backbone's earlier next-token distributions.

A pass computes a distribution at every node and uses one token of it; the top k of the others are kept by token, and trees are grown
from them. The paper keeps the last distribution of each token and fills a fixed template; here the last few are mixed, and the tree is
grown by path probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from headstart.inference.sources.best_first import grow
from headstart.inference.sources.proposer import Candidates, Proposer

KEPT_DISTRIBUTIONS = 3
"""Distributions that are kept for each token."""
NEWEST_WEIGHT = 0.5
"""The weight of the newest; the one before has the same share of what is left, and so on. The remainder stays unassigned: a distribution
seen once is right about half the time."""

TopK = tuple[list[int], list[float]]
"""Likeliest next tokens and their log-probabilities, best first."""


class RecyclingProposer(Proposer):
    """One table for all sequences, since it describes the model; it stays from call to call. About 2 kB for each token read so far."""

    name = "recycling"
    observe_top_k = 8

    def __init__(self) -> None:
        self.table: dict[int, tuple[TopK, ...]] = {}
        """For each token the distributions after it, newest first."""
        self.roots: dict[int, int] = {}

    def open(self, sequence: int, tokens: list[int]) -> None:
        self.roots[sequence] = tokens[-1]

    def extend(self, sequence: int, tokens: list[int]) -> None:
        self.roots[sequence] = tokens[-1]

    def observe(self, tokens: list[int], top_tokens: list[list[int]], logprobs: list[list[float]]) -> None:
        table = self.table
        for token, top_k in zip(tokens, zip(top_tokens, logprobs, strict=True), strict=True):
            table[token] = (top_k, *table.get(token, ())[: KEPT_DISTRIBUTIONS - 1])

    def after(self, token: int, least: float) -> Iterator[tuple[int, float, int]]:
        """Possible next tokens, their probabilities, and once more the tokens, as states to go on from."""
        probs: dict[int, float] = {}
        share = NEWEST_WEIGHT
        for tokens, logprobs in self.table.get(token, ()):
            for following, logprob in zip(tokens, logprobs, strict=True):
                prob = share * math.exp(logprob)
                if prob < NEWEST_WEIGHT * least:
                    break
                probs[following] = probs.get(following, 0.0) + prob
            share *= 1 - NEWEST_WEIGHT
        return ((following, prob, following) for following, prob in probs.items())

    def propose(self, sequence: int, depths: int, nodes: int) -> Candidates:
        return grow(self.roots[sequence], self.after, depths, nodes)
