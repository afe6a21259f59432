"""The beams of a row as one trie: the tokens that all beams share, followed by the tokens and drafts of each beam as nodes.

A row's KV cache holds the shared tokens, each in the slot of its position, followed by the trie's nodes in the order of their numbers.
After every pass, nodes that are neither ancestors nor descendants of a beam's last token are dropped.

Levels count from the end of the shared tokens. Shape suffixes: B batch, N nodes verified in this pass, M all nodes of the trie (the N
included), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.kv.ragged_cache import RaggedCache
from headstart.heads.kv.rows import octave_up, whole_steps
from headstart.heads.kv.tree_mask import ancestors_from_parents
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.tree import graph_size, padded_size


class BeamTrie:
    """The trie of one row. A parent precedes its children; parent -1 is the last token that all beams share."""

    def __init__(self, shared: int) -> None:
        self.shared = shared
        """The number of tokens that all beams share, prompt included."""
        self.shared_tokens: list[int] = []
        """The shared tokens after the prompt."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.levels: list[int] = []
        self.top_k: list[TopK] = []
        """The top k of each verified node."""
        self._nodes: dict[tuple[int, int], int] = {}

    @property
    def verified(self) -> int:
        """The number of verified nodes; they come first."""
        return len(self.top_k)

    @property
    def new(self) -> int:
        """The number of nodes not verified yet."""
        return len(self.tokens) - len(self.top_k)

    def add(self, parent: int, token: int) -> int:
        """The node of that token below that parent, added if there is none."""
        node = self._nodes.get((parent, token))
        if node is None:
            node = self._nodes[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.levels.append(0 if parent < 0 else self.levels[parent] + 1)
        return node

    def find(self, parent: int, token: int) -> int | None:
        """The node of that token below that parent, if there is one."""
        return self._nodes.get((parent, token))

    def path(self, node: int) -> list[int]:
        """The nodes from the top of the trie down to that one."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def below(self, nodes: list[int]) -> dict[int, int]:
        """Map these nodes and their descendants to the one of these nodes that they descend from."""
        origins = {node: node for node in nodes}
        for node, parent in enumerate(self.parents):
            if parent in origins:
                origins.setdefault(node, origins[parent])
        return origins

    def keep(self, last: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
        """Drop the nodes that no beam needs, once all nodes have been verified. Beam i continues with ``tokens[i]`` after node ``last[i]``;
        the nodes in ``last`` have one level.

        Returns the old numbers of the nodes kept, and the new numbers of ``last``.
        """
        roots = [self.find(node, token) for node, token in zip(last, tokens, strict=True)]
        ahead = self.below([node for node in roots if node is not None])
        kept = sorted({node for end in set(last) for node in self.path(end)} | set(ahead))
        levels = [self.levels[node] for node in kept]
        common = next((i for i, level in enumerate(levels) if levels.count(level) > 1 or level > self.levels[last[0]]), len(kept))
        numbers = {node: i - common for i, node in enumerate(kept)} | dict.fromkeys([-1, *kept[:common]], -1)
        old = self.tokens, self.parents, self.top_k
        self.shared += common
        self.shared_tokens += [old[0][node] for node in kept[:common]]
        self.tokens, self.parents, self.levels, self._nodes = [], [], [], {}
        for node in kept[common:]:
            self.add(numbers[old[1][node]], old[0][node])
        self.top_k = [old[2][node] for node in kept[common:]]
        return kept, [numbers[node] for node in last]

    def ancestors(self) -> np.ndarray:
        """``[M, M]``, True where the second node is an ancestor of the first, or the first itself."""
        return ancestors_from_parents([[0, *(parent + 1 for parent in self.parents)]])[0, 1:, 1:]  # node 0 is a temporary root


@dataclass(frozen=True)
class TopK:
    """The most likely next tokens of a node by processed log-probabilities, best first; all scores, and logits where requested."""

    logprobs_M: np.ndarray
    tokens_M: np.ndarray
    scores_V: Tensor
    logits_V: Tensor | None = None


def read_tries(reader: Reader, cache: RaggedCache, tries: list[BeamTrie]) -> tuple[Features, Tensor]:
    """Compute the features ``[B, N]`` and logits ``[B, N, V]`` of every row's new nodes in one forward pass.

    A row with fewer nodes is padded with its first new one, tries as slots are, so that few shapes occur. The cache's lengths count the
    shared tokens.
    """
    padded, rounded = (padded_size, whole_steps) if cache.memory is None else (graph_size, octave_up)
    B, N = len(tries), padded(max(trie.new for trie in tries))
    M = rounded(max(trie.verified + N for trie in tries))
    tokens_BN, index_BN, levels_BM = np.empty((B, N), np.int64), np.empty((B, N), np.int64), np.empty((B, M), np.int64)
    ancestors_BNM = np.zeros((B, N, M), np.bool_)
    for b, trie in enumerate(tries):
        first, new, count = trie.verified, trie.new, len(trie.tokens)
        tokens_BN[b], levels_BM[b] = trie.tokens[first], trie.levels[first]
        tokens_BN[b, :new] = trie.tokens[first:]
        levels_BM[b, :count] = trie.levels
        index_BN[b] = first + np.arange(N)
        above = trie.ancestors()
        ancestors_BNM[b, :, :count] = above[first]
        ancestors_BNM[b, :new, :count] = above[first:]
    # Every row has room for the longest trie: the paths of all rows are moved together when nodes are dropped.
    slots = max(trie.shared for trie in tries) + max(trie.verified for trie in tries) + N
    nodes = (torch.from_numpy(one).to(cache.lengths_B.device) for one in (tokens_BN, levels_BM, ancestors_BNM, index_BN))
    return reader.nodes(cache, cache.room(slots - cache.longest), *nodes)[:2]
