"""The beams of a row as one trie: the tokens that all beams share, followed by the tokens and drafts of each beam as nodes.

A row's KV cache holds the shared tokens, each in the slot of its position, followed by the trie's nodes in the order of their numbers.
After every pass, nodes that are neither ancestors nor descendants of a beam's last token are dropped.

Levels count from the end of the shared tokens. Shape suffixes: B batch, N nodes verified in this pass, M all nodes of the trie (the N
included), R paths, P nodes of a path, V vocabulary, Y what is known after a token (see search.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headstart.heads.backbone.features import Features, join_features
from headstart.heads.kv.ragged_cache import RaggedCache, ancestors_from_parents
from headstart.heads.kv.rows import octave_up, whole_steps
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.tree import graph_size, padded_size
from headstart.support.pytree import map_tensors


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
        self.after: list[Tensor] = []
        """What is known after each verified node ``[Y, V]``."""
        self.features: Features | None = None
        """The features of the verified nodes ``[1, M]``, where drafters read them."""
        self.nodes: dict[tuple[int, int], int] = {}
        """The node of a token below a parent."""

    @property
    def verified(self) -> int:
        """The number of verified nodes; they come first."""
        return len(self.after)

    @property
    def new(self) -> int:
        """The number of nodes not verified yet."""
        return len(self.tokens) - len(self.after)

    def add(self, parent: int, token: int) -> int:
        """The node of that token below that parent, added if there is none."""
        return self.nodes[parent, token] if (parent, token) in self.nodes else self.append(parent, token)

    def append(self, parent: int, token: int) -> int:
        """A further node of that token below that parent."""
        node = self.nodes[parent, token] = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.levels.append(0 if parent < 0 else self.levels[parent] + 1)
        return node

    def path(self, node: int) -> list[int]:
        """The nodes from the top of the trie down to that one."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def verify(self, after_NYV: Tensor, features: Features | None) -> None:
        """Add what a pass found for the new nodes, which come first. ``features``: ``[1, N]``."""
        if features is not None:
            features = map_tensors(lambda value_1N: value_1N[:, : self.new], features)
            self.features = features if self.features is None else join_features([self.features, features])
        self.after += after_NYV[: self.new]

    def along(self, paths: list[list[int]], longest: int) -> Features:
        """The features ``[R, longest]`` of paths of verified nodes, right-padded."""
        assert self.features is not None
        device, count = self.features.tokens_BT.device, len(paths[0])  # all are equally long
        index_RP = torch.tensor([path + [0] * (longest - count) for path in paths], device=device)
        of_paths = self.features.rows(torch.zeros(len(paths), dtype=torch.int64, device=device))
        return of_paths.gather(index_RP, (torch.arange(longest, device=device) < count).expand(index_RP.shape))

    def keep(self, last: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
        """Drop the nodes that no beam needs, once all nodes have been verified. Beam i continues with ``tokens[i]`` after node ``last[i]``;
        the nodes in ``last`` have one level.

        Returns the old numbers of the nodes kept, and the new numbers of ``last``.
        """
        paths = [{*self.path(node)} for node in last]
        ahead = {self.nodes[one] for one in zip(last, tokens, strict=True) if one in self.nodes}
        for node, parent in enumerate(self.parents):
            if parent in ahead:
                ahead.add(node)
        kept, common = sorted(set.union(*paths, ahead)), len(set.intersection(*paths))
        shared, nodes = kept[:common], kept[common:]
        numbers = dict.fromkeys([-1, *shared], -1) | {node: i for i, node in enumerate(nodes)}
        self.shared += common
        self.shared_tokens += [self.tokens[node] for node in shared]
        self.tokens, self.levels = [self.tokens[node] for node in nodes], [self.levels[node] - common for node in nodes]
        self.parents, self.after = [numbers[self.parents[node]] for node in nodes], [self.after[node] for node in nodes]
        self.features = map_tensors(lambda value_1M: value_1M[:, nodes], self.features)
        self.nodes = {key: i for i, key in enumerate(zip(self.parents, self.tokens, strict=True))}
        return kept, [numbers[node] for node in last]

    def ancestors(self) -> np.ndarray:
        """``[M, M]``, True where the second node is an ancestor of the first, or the first itself."""
        return ancestors_from_parents([[0, *(parent + 1 for parent in self.parents)]])[0, 1:, 1:]  # node 0 is a temporary root


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
        first, count = trie.verified, len(trie.tokens)
        index_BN[b] = first + np.arange(N)
        new_N = np.where(index_BN[b] < count, index_BN[b], first)
        tokens_BN[b], ancestors_BNM[b, :, :count] = np.array(trie.tokens)[new_N], trie.ancestors()[new_N]
        levels_BM[b, :count], levels_BM[b, count:] = trie.levels, trie.levels[first]
    # Every row has room for the longest trie: the paths of all rows are moved together when nodes are dropped.
    slots = max(trie.shared for trie in tries) + max(trie.verified for trie in tries) + N
    nodes = (torch.from_numpy(one).to(cache.lengths_B.device) for one in (tokens_BN, levels_BM, ancestors_BNM, index_BN))
    return reader.nodes(cache, cache.room(slots - cache.longest), *nodes)[:2]
