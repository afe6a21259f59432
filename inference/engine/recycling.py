"""Token recycling (2408.08696): drafts from the backbone's earlier next-token distributions.

A forward pass computes a distribution at every node, of which decoding uses one token. The top k of each are stored by the node's token,
and trees are built from them. The paper stores the last distribution of each token and fills a fixed template; here the last few
distributions are mixed, and the tree is expanded by path probability.
"""

import math
from collections.abc import Iterator

from headstart.inference.engine.proposer import Candidates, Proposer, grow

KEPT_DISTRIBUTIONS = 3
"""Number of distributions kept for each token."""
NEWEST_WEIGHT = 0.5
"""Weight of the newest distribution; each older one gets the same fraction of the remaining weight. The rest stays unassigned, because a
distribution seen once is right about half the time."""

TopK = tuple[list[int], list[float]]
"""Most likely next tokens and their log-probabilities, best first."""


class RecyclingProposer(Proposer):
    """Keeps one table for all sequences and calls, since it describes the model. It takes about 2 kB per distinct token seen so far."""

    name = "recycling"
    observe_top_k = 8

    def __init__(self) -> None:
        self.table: dict[int, tuple[TopK, ...]] = {}
        """The distributions after each token, newest first."""
        self.roots: dict[int, int] = {}

    def open(self, sequence: int, tokens: list[int]) -> None:
        self.roots[sequence] = tokens[-1]

    extend = open

    def observe(self, tokens: list[int], top_tokens: list[list[int]], logprobs: list[list[float]]) -> None:
        table = self.table
        for token, top_k in zip(tokens, zip(top_tokens, logprobs, strict=True), strict=True):
            table[token] = (top_k, *table.get(token, ())[: KEPT_DISTRIBUTIONS - 1])

    def after(self, token: int, least: float) -> Iterator[tuple[int, float, int]]:
        """Possible next tokens, their probabilities, and their states, which are the tokens again."""
        probs, share = dict[int, float](), NEWEST_WEIGHT
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
