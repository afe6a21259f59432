"""The choice of a candidate tree: how deep to draft and how many nodes to verify, or none.

A pass over a tree writes one token plus the sum of the path probabilities of its drafts in expectation (`Pool`), so the N most likely
nodes are the best tree of N, and the best N is that of the most expected tokens per second (Sequoia, 2402.12374; OPT-Tree, 2406.17276).
Before a draft the same choice is made among depths, by the path probabilities that recent drafts had. Nothing here has state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Choice:
    """The depths to draft, the nodes to verify (the root included) and the seconds that the step is expected to take."""

    depths: int
    nodes: int
    seconds: float
    cost: float
    """Seconds times the steps left: the choice with the least is the fastest."""


def steps_left(tokens: Sequence[float]) -> float:
    """A measure of the steps left if each writes so many tokens to each row: only their sum counts."""
    return 1 / sum(tokens)


def best_tree(
    depths: int,
    drafting: float,
    probs: Sequence[Sequence[float]],
    passes: Mapping[int, float],
    left: Callable[[Sequence[float]], float] = steps_left,
) -> Choice:
    """Choose the size of a tree of so many depths, whose drafting takes or took so many seconds; its cost compares it with other depths.

    ``probs``: for each row, the path probabilities of its drafts in any order. ``passes``: the sizes to choose from in ascending order,
    nodes of a row, each with the seconds of a pass over them. ``left``: a measure of the steps left if each writes so many tokens to each
    row (`Draft.passes_left`).
    """
    sums = [list(accumulate(sorted(row, reverse=True), initial=1.0)) for row in probs]  # expected tokens, by nodes
    largest, best = max(map(len, sums)), Choice(depths, 1, 0.0, math.inf)
    for nodes, verifying in passes.items():
        seconds = drafting + verifying
        cost = seconds * left([row[min(nodes, len(row)) - 1] for row in sums])
        if cost < best.cost:  # of equals the smaller
            best = Choice(depths, nodes, seconds, cost)
        if nodes >= largest:
            break
    return best
