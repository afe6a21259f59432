"""Verification: the accepted path starts at the root and continues as long as a child has the token that the backbone picks.

The noise is a function of seed and position, so a pick does not depend on the tree: no rejection sampling, no residual
distributions and no special case for greedy decoding are needed.
"""

from __future__ import annotations

from torch import Tensor

from headstart.inference.engine.tree import CandidateTree


def pick(scores: Tensor, noise: Tensor | None) -> Tensor:
    """The decoding rule: ``argmax_v (scores + noise)`` over the last dimension; without noise, temperature 0."""
    return (scores if noise is None else scores + noise).argmax(-1)


def accept(tree: CandidateTree, picks: list[list[int]]) -> list[list[int]]:
    """For each row, the path from the root on which every token is the pick at its parent; the pick at its last node is the next root."""
    paths = []
    for tokens, parents, picked in zip(tree.tokens, tree.parents, picks, strict=True):
        path = [0]
        for node in range(1, len(tokens)):
            if parents[node] == path[-1] and tokens[node] == picked[path[-1]]:
                path.append(node)
        paths.append(path)
    return paths
