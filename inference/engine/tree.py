"""Candidate trees: the drafts of a row are merged into one pool, a part of the pool is verified, and a path of that accepted.

With ``c(u)`` the path probability of node u, a forward pass over a tree yields ``1 + sum c(u)`` tokens in expectation, so the best tree
of N nodes consists of the N nodes of largest c (the re-ranking of EAGLE-2, 2406.16858; OPT-Tree, 2406.17276, uses the same rule). Trees
are built on the host: they are small, several sources add to one tree, and its size is chosen there.

Levels count from the root (level 0); a node of level ``l`` was drafted at depth ``l - 1``. Shape suffixes: B batch, N tree nodes.

Tree sizes to choose from and to measure, and numbers of rows by octave; there are few, so that each occurs often.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from headstart.heads.base import require_count
from headstart.heads.layers.ragged_cache import ancestors_from_parents
from headstart.support.config import MAX_DEPTH, MAX_NODES, MAX_WIDTH

TREE_SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Candidate tree sizes (nodes per row, the root included) that decoding chooses from."""
MIN_PADDED = 4
"""Where each size is captured apart, a tree has one node or a power of two of at least these; the same for positions."""
BEAM_WIDTH, CPU_WIDTH = 8, 4
"""Nodes kept and expanded at each draft level, unless a `TreeShape` sets another width: in general, and for a single row on a CPU."""


def padded_size(nodes: int) -> int:
    """The size that a tree is padded to, so that few shapes occur."""
    return next((size for size in TREE_SIZES if size >= nodes), -(-nodes // 16) * 16)


def graph_size(count: int) -> int:
    """The number of nodes or positions that so many are padded to where each is captured apart."""
    return 1 if count == 1 else max(MIN_PADDED, 1 << (count - 1).bit_length())


def octave(rows: int) -> int:
    """The number of rows as a power of two, rounded down: its exponent."""
    return rows.bit_length() - 1


MAX_PROB = 0.999
"""Upper bound of acceptance probabilities, so that a child always has a smaller path probability than its parent."""


@dataclass(frozen=True)
class TreeShape:
    """A fixed tree size: ``nodes`` including the root, beam ``width``, and ``depth`` (None: the drafter's)."""

    nodes: int = 24
    width: int = 8
    depth: int | None = None

    def __post_init__(self) -> None:
        require_count("nodes", self.nodes, of="tree", most=MAX_NODES)
        require_count("width", self.width, of="tree", most=MAX_WIDTH)
        if self.depth is not None:
            require_count("depth", self.depth, of="tree", most=MAX_DEPTH)


TreeSize = TreeShape | Literal["auto"]
"""auto: the size adapts to acceptance rates and measured latency."""


@dataclass(frozen=True)
class Proposal:
    """A node drafted by a source, with the source's score: the log of its own estimate of the acceptance probability."""

    source: Hashable
    node: int
    score: float


class Pool:
    """All drafts of one row. Node 0 is the root; a token after a given parent is one node, even if several sources drafted it."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.levels = [root], [0], [0]
        self.probs = [1.0]
        """Acceptance probability of each node, given that its parent is accepted."""
        self.proposals: list[Proposal] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, source: Hashable, parent: int, token: int, score: float, prob: float) -> int:
        """Add a token below a parent and return its node; the largest probability of several sources is kept."""
        prob = min(prob, MAX_PROB)
        node = self._nodes.get((parent, token))
        if node is None:
            node = self._nodes[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.levels.append(self.levels[parent] + 1)
            self.probs.append(prob)
        elif prob > self.probs[node]:
            self.probs[node] = prob
        self.proposals.append(Proposal(source, node, score))
        return node

    def path_probs(self) -> list[float]:
        """For each node, the probability that the path to it is accepted; siblings are scaled down to sum to `MAX_PROB` at most."""
        sums = [0.0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            sums[self.parents[node]] += self.probs[node]
        probs = [1.0]
        for node in range(1, len(self.tokens)):
            parent = self.parents[node]
            probs.append(probs[parent] * self.probs[node] / max(sums[parent] / MAX_PROB, 1.0))
        return probs

    def ranked(self) -> list[tuple[float, int]]:
        """Path probability and number of each node but the root, most likely first; every prefix of the list forms a tree."""
        probs = self.path_probs()
        return sorted(((probs[node], node) for node in range(1, len(probs))), key=lambda node: (-node[0], node[1]))

    def best_path(self) -> list[tuple[float, int]]:
        """The same of the one path from the root on which most tokens are expected to be accepted."""
        probs, best = self.path_probs(), dict[int, tuple[float, int]]()
        for node in range(len(probs) - 1, 0, -1):
            expected = probs[node] + best.get(node, (0.0, 0))[0]
            best[self.parents[node]] = max(best.get(self.parents[node], (0.0, 0)), (expected, node))
        path, node = list[tuple[float, int]](), 0
        while node in best:
            node = best[node][1]
            path.append((probs[node], node))
        return path


@dataclass(frozen=True)
class CandidateTree:
    """The nodes of each row. Node 0 is the root: the token that the backbone has just picked. A parent precedes its children."""

    tokens: list[list[int]]
    parents: list[list[int]]
    """The parent of each node; 0 for the root."""
    pooled: list[list[int]] = field(default_factory=list)
    """The number of each node in its row's pool, if it is from one."""

    @staticmethod
    def of(pools: Sequence[Pool], kept: list[list[int]]) -> CandidateTree:
        """The tree of the ``kept`` nodes of each pool."""
        parents = []
        for pool, nodes in zip(pools, kept, strict=True):
            index = {node: i for i, node in enumerate(nodes)}
            parents.append([index[pool.parents[node]] for node in nodes])
        return CandidateTree([[pool.tokens[node] for node in nodes] for pool, nodes in zip(pools, kept, strict=True)], parents, kept)

    @property
    def size(self) -> int:
        """The largest number of nodes in a row."""
        return max(map(len, self.tokens))

    @cached_property
    def levels(self) -> list[list[int]]:
        """The level of each node; 0 for the root."""
        levels = []
        for parents in self.parents:
            row = [0]
            for parent in parents[1:]:
                row.append(row[parent] + 1)
            levels.append(row)
        return levels

    @property
    def height(self) -> int:
        """The level of the deepest node."""
        return max(map(max, self.levels))

    def tensors(self, device: torch.device, nodes: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens ``[B, N]``, levels ``[B, N]`` and ancestors ``[B, N, N]`` (True where the second node is an ancestor of the first, or the
        first itself). A row with fewer nodes than the largest, or than ``nodes``, is padded with its root."""
        N = max(self.size, nodes)
        tokens = [row + row[:1] * (N - len(row)) for row in self.tokens]
        arranged = [_arranged((*row, *[0] * (N - len(row)))) for row in self.parents]
        levels, ancestors = (torch.from_numpy(np.stack(arrays)).to(device) for arrays in zip(*arranged, strict=True))
        return torch.tensor(tokens, device=device), levels, ancestors


@lru_cache(1 << 12)
def _arranged(parents: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Levels ``[N]`` and ancestors ``[N, N]`` of a row's nodes with these parents: few arrangements occur."""
    ancestors = ancestors_from_parents([parents])[0]
    return ancestors.sum(-1, dtype=np.int64) - 1, ancestors


def chain(tokens: list[int]) -> CandidateTree:
    """The tree of one row in which every node has one child."""
    return CandidateTree([tokens], [[max(node - 1, 0) for node in range(len(tokens))]])


@dataclass(frozen=True)
class VerifiedTree:
    """The tree of one row in one pass, as it is reported: a token and a parent for each node (node 0 is the root, its own parent), and
    the ``path`` of accepted nodes, which begins at the root."""

    tokens: list[int]
    parents: list[int]
    path: list[int]

    @property
    def drafted(self) -> int:
        """The number of tokens drafted."""
        return len(self.tokens) - 1

    @property
    def kept(self) -> int:
        """The number of drafts that the backbone's picks confirmed, those past the end of the text included."""
        return len(self.path) - 1


# Verification: the accepted path starts at the root and goes on as long as a child has the token that the backbone picks. The noise is a
# function of seed and position, so a pick does not depend on the tree: no rejection sampling and no residual distributions are needed.


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
