"""The candidate tree, and how a drafter grows it.

With ``c(u)`` the chance that node u is reached, the expected tokens of a pass are ``1 + sum c(u)``, so the best tree of N nodes
is the N nodes of largest c (EAGLE-2's re-ranking, OPT-Tree and DDTree are this rule). It is grown depth by depth with a beam.

Shape suffixes: B batch, N tree nodes, W beam width, D width, V draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import Drafter, require_count

LEVEL_COST = 1e-4
"""Subtracted from a score per depth, so that no child ties with its parent and the best N nodes are always a tree."""


@dataclass(frozen=True)
class TreeShape:
    """How large a tree may be: ``nodes`` with the root, ``width`` of the beam, ``depth`` (None: the drafter's)."""

    nodes: int = 24
    width: int = 8
    depth: int | None = None

    def __post_init__(self) -> None:
        require_count("nodes", self.nodes, of="tree")
        require_count("width", self.width, of="tree")
        if self.depth is not None:
            require_count("depth", self.depth, of="tree")


@dataclass(frozen=True)
class CandidateTree:
    """Node 0 is the root: the token the backbone has just chosen. A parent stands before its children; the root's is 0."""

    tokens_BN: Tensor
    parents_BN: Tensor
    height: int
    """No node is deeper than this."""

    @cached_property
    def ancestors_BNN(self) -> Tensor:
        """True where the second node is an ancestor of the first, or the first itself."""
        B, N = self.parents_BN.shape
        reach = torch.eye(N, device=self.parents_BN.device).expand(B, N, N).clone()
        reach.scatter_(2, self.parents_BN[..., None], 1.0)
        for _ in range(math.ceil(math.log2(max(self.height, 1)))):
            reach = reach @ reach  # a path of n steps, then of 2n
        return reach > 0

    @cached_property
    def depths_BN(self) -> Tensor:
        """How far below the root."""
        return self.ancestors_BNN.sum(-1) - 1


def root_only(roots_B: Tensor) -> CandidateTree:
    """Plain decoding is the tree with no candidates."""
    return CandidateTree(roots_B[:, None], torch.zeros_like(roots_B[:, None]), 0)


@dataclass(frozen=True)
class Ranking:
    """How candidates are scored: ``log softmax(sharpness * (logits / temperature + noise))``, added up along the path.

    The noise is that of the positions drafted, ``noise_BPV[:, depth]``, the same the backbone's pick will be made with.
    """

    temperature: float = 1.0
    noise_BPV: Tensor | None = None
    sharpness: float = 1.0

    def scores(self, logits_BNV: Tensor, depth: int, vocabulary: Tensor | None) -> Tensor:
        """``[B, N, V]`` log chances of each candidate, given its parent."""
        if self.noise_BPV is None:
            return logits_BNV.float().log_softmax(-1)
        noise_BV = self.noise_BPV[:, depth]
        noise_BV = noise_BV if vocabulary is None else noise_BV[:, vocabulary]
        return ((logits_BNV.float() / self.temperature + noise_BV[:, None]) * self.sharpness).log_softmax(-1)


def grow(drafter: Drafter, state: Any, roots_B: Tensor, shape: TreeShape, ranking: Ranking) -> CandidateTree:
    """Depth by depth from the ``width`` likeliest nodes; of all, the ``nodes`` likeliest stay. Nothing is read back to the host."""
    depth = min(shape.depth or drafter.depth, drafter.depth)
    tokens, parents = [roots_B[:, None]], [torch.zeros_like(roots_B[:, None])]
    scores = [torch.zeros(len(roots_B), 1, device=roots_B.device)]
    places_BW, first = parents[0], 0
    for k in range(depth):
        hidden, state = drafter.step(state, tokens[-1], places_BW, k)
        logits_BNV = drafter.readout(hidden, k, tokens[-1])
        V = logits_BNV.shape[-1]
        total_BNV = ranking.scores(logits_BNV, k, drafter.vocabulary) + (scores[-1][..., None] - LEVEL_COST)
        best = total_BNV.flatten(1).topk(min(shape.width, total_BNV[0].numel()))
        places_BW, drafted = best.indices // V, best.indices % V
        tokens.append(drafted if drafter.vocabulary is None else drafter.vocabulary[drafted])
        parents.append(first + places_BW)
        scores.append(best.values.nan_to_num(nan=-math.inf))  # heads that have diverged may not push the root out of the tree
        first += scores[-2].shape[1]
    return _best(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), shape.nodes, depth)


def _best(tokens_BM: Tensor, parents_BM: Tensor, scores_BM: Tensor, nodes: int, height: int) -> CandidateTree:
    if nodes >= tokens_BM.shape[1]:
        return CandidateTree(tokens_BM, parents_BM, height)
    keep_BN = scores_BM.topk(nodes).indices.sort().values
    place_BM = torch.zeros_like(parents_BM).scatter_(1, keep_BN, torch.arange(nodes, device=keep_BN.device).expand_as(keep_BN))
    return CandidateTree(tokens_BM.gather(1, keep_BN), place_BM.gather(1, parents_BM.gather(1, keep_BN)), height)
