"""The candidate tree: what was drafted for a row, merged, and the best of it.

With ``c(u)`` the chance that node u is reached, the expected tokens of a pass are ``1 + sum c(u)``, so the best tree of N nodes is
the N nodes of largest c (EAGLE-2's re-scoring, OPT-Tree and DDTree are this rule). Trees live on the host: they are small, several
proposers hang their nodes into one, and how large to make one is decided there.

Shape suffixes: B batch, N tree nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from headstart.heads.base import require_count
from headstart.heads.layers.tree_mask import ancestors_from_parents

SURE = 0.999
"""No candidate is surer than this, so that a child is always less likely than its parent."""


@dataclass(frozen=True)
class TreeShape:
    """A fixed size: ``nodes`` with the root, ``width`` of the beam, ``depth`` (None: the drafter's)."""

    nodes: int = 24
    width: int = 8
    depth: int | None = None

    def __post_init__(self) -> None:
        require_count("nodes", self.nodes, of="tree")
        require_count("width", self.width, of="tree")
        if self.depth is not None:
            require_count("depth", self.depth, of="tree")


@dataclass(frozen=True)
class Proposal:
    """That a proposer drafted a node, and its score there (log of its own estimate, given the parent)."""

    source: int
    node: int
    score: float


class Pool:
    """All that was drafted for one row. Node 0 is the root; a token below a parent is one node, whoever drafted it."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.depths = [root], [0], [0]
        self.chances = [1.0]
        """That a node is the pick, given that its parent is."""
        self.proposals: list[Proposal] = []
        self._place: dict[tuple[int, int], int] = {}

    def add(self, source: int, parent: int, token: int, score: float, chance: float) -> int:
        """The node of that token below that parent; of two proposers the surer is believed."""
        chance = min(chance, SURE)
        node = self._place.get((parent, token))
        if node is None:
            node = self._place[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.chances.append(chance)
        elif chance > self.chances[node]:
            self.chances[node] = chance
        self.proposals.append(Proposal(source, node, score))
        return node

    def reach(self) -> list[float]:
        """The chance of each node to be reached; siblings that claim more than all of it share it."""
        claimed = [0.0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            claimed[self.parents[node]] += self.chances[node]
        found = [1.0]
        for node in range(1, len(self.tokens)):
            parent = self.parents[node]
            found.append(found[parent] * self.chances[node] / max(claimed[parent] / SURE, 1.0))
        return found

    def ranked(self) -> list[tuple[float, int]]:
        """Chance and number of each node but the root, likeliest first: any beginning of it is a tree."""
        reach = self.reach()
        return sorted(((reach[node], node) for node in range(1, len(reach))), key=lambda one: (-one[0], one[1]))

    def best(self, nodes: int) -> list[int]:
        """The ``nodes`` likeliest, the root among them, parents before children."""
        return [0, *sorted(node for _, node in self.ranked()[: nodes - 1])]


@dataclass(frozen=True)
class CandidateTree:
    """For each row its nodes. Node 0 is the root: the token the backbone has just chosen. A parent stands before its children."""

    tokens: list[list[int]]
    parents: list[list[int]]
    """The root's is 0."""

    @staticmethod
    def of(pools: list[Pool], kept: list[list[int]]) -> CandidateTree:
        """The ``kept`` nodes of each pool."""
        parents = []
        for pool, nodes in zip(pools, kept, strict=True):
            place = {node: i for i, node in enumerate(nodes)}
            parents.append([place[pool.parents[node]] for node in nodes])
        return CandidateTree([[pool.tokens[node] for node in nodes] for pool, nodes in zip(pools, kept, strict=True)], parents)

    @property
    def size(self) -> int:
        """The most nodes a row has."""
        return max(map(len, self.tokens))

    @cached_property
    def depths(self) -> list[list[int]]:
        """How far below the root."""
        found = []
        for parents in self.parents:
            row = [0]
            for parent in parents[1:]:
                row.append(row[parent] + 1)
            found.append(row)
        return found

    @property
    def height(self) -> int:
        """The depth of the deepest node."""
        return max(map(max, self.depths))

    def ancestors(self) -> np.ndarray:
        """``[B, N, N]``, True where the second node is an ancestor of the first, or the first itself."""
        return ancestors_from_parents(self.parents)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens ``[B, N]``, depths ``[B, N]`` and ancestors ``[B, N, N]``. A row with fewer nodes has its root again at the end."""
        B, N = len(self.tokens), self.size
        if N == 1:
            alone_B1 = torch.tensor(self.tokens, device=device)
            return alone_B1, torch.zeros_like(alone_B1), torch.ones(B, 1, 1, dtype=torch.bool, device=device)
        tokens = [row + row[:1] * (N - len(row)) for row in self.tokens]
        depths = [row + [0] * (N - len(row)) for row in self.depths]
        return (
            torch.tensor(tokens, device=device),
            torch.tensor(depths, device=device),
            torch.from_numpy(self.ancestors()).to(device),
        )


def root_only(roots: list[int]) -> CandidateTree:
    """Plain decoding is the tree with no candidates."""
    return CandidateTree([[root] for root in roots], [[0] for _ in roots])
