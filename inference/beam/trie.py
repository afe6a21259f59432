"""The texts of a row that beam search has in flight, as one trie: what all share is read once, what a beam drafts hangs below it.

The cache of a row holds the keys of what all its beams share, in slots that are positions, and behind it those of the trie's nodes,
each in the slot of its number. After every pass, nodes that are on no beam's way, neither before nor behind its last token, are dropped.

Shape suffixes: B batch, N nodes read now, M nodes of the trie (these among them), S slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.layers.tree_mask import masks_by_kind
from headstart.inference.capture.capture import Capturer
from headstart.inference.engine.cache import RaggedCache, Stores, TreeCache
from headstart.inference.engine.reader import Reader
from headstart.inference.speculation.cost_model import SIZES

TRIE_STEP = 64
"""Tries are padded to multiples of it, so that few shapes occur."""


class BeamTrie:
    """One row. A parent stands before its children; parent -1 is the end of what all beams share."""

    def __init__(self, shared: int) -> None:
        self.shared = shared
        """Tokens, the prompt's among them, that every beam begins with."""
        self.told: list[int] = []
        """Those of them that are not the prompt's."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.said: list[TopK] = []
        """At the nodes that have been read."""
        self._place: dict[tuple[int, int], int] = {}

    @property
    def read(self) -> int:
        """How many nodes have been read: the first ones."""
        return len(self.said)

    @property
    def new(self) -> int:
        """How many have not."""
        return len(self.tokens) - len(self.said)

    def add(self, parent: int, token: int) -> int:
        """The node of that token below that parent."""
        node = self._place.get((parent, token))
        if node is None:
            node = self._place[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
        return node

    def find(self, parent: int, token: int) -> int | None:
        """The node of that token below that parent, if there is one."""
        return self._place.get((parent, token))

    def path(self, node: int) -> list[int]:
        """The nodes down to that one."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def below(self, nodes: list[int]) -> dict[int, int]:
        """All nodes from these on downwards, each with the one of these it descends from."""
        found = {node: node for node in nodes}
        for node, parent in enumerate(self.parents):
            if parent in found:
                found.setdefault(node, found[parent])
        return found

    def keep(self, last: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
        """All nodes have been read; the beams go on with these tokens behind these nodes, which are of one depth. Drop what is not theirs.

        The old numbers of the nodes kept, and the new ones of ``last``.
        """
        found = [self.find(node, token) for node, token in zip(last, tokens, strict=True)]
        ahead = self.below([node for node in found if node is not None])
        kept = sorted({node for end in set(last) for node in self.path(end)} | set(ahead))
        depths = [self.depths[node] for node in kept]
        common = next((i for i, depth in enumerate(depths) if depths.count(depth) > 1 or depth > self.depths[last[0]]), len(kept))
        place = {node: i - common for i, node in enumerate(kept)} | dict.fromkeys([-1, *kept[:common]], -1)
        old = self.tokens, self.parents, self.said
        self.shared += common
        self.told += [old[0][node] for node in kept[:common]]
        self.tokens, self.parents, self.depths, self._place = [], [], [], {}
        for node in kept[common:]:
            self.add(place[old[1][node]], old[0][node])
        self.said = [old[2][node] for node in kept[common:]]
        return kept, [place[node] for node in last]

    def ancestors(self) -> np.ndarray:
        """``[M, M]``, True where the second node is an ancestor of the first, or the first itself."""
        found = np.eye(len(self.tokens), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                found[node] |= found[parent]
        return found


@dataclass(frozen=True)
class TopK:
    """What the backbone has said at a node, processed: the likeliest next tokens, best first; and all, where the call wants them."""

    logprobs_M: np.ndarray
    tokens_M: np.ndarray
    scores_V: Tensor | None = None
    logits_V: Tensor | None = None


@dataclass(frozen=True)
class Nodes:
    """What a pass reads, as tensors; a row with fewer nodes has its first new one again at the end."""

    tokens_BN: Tensor
    places_BN: Tensor
    """Their numbers in the trie."""
    positions_BM: Tensor
    ancestors_BNM: Tensor
    shared_B: Tensor


class TrieReader:
    """Reads the new nodes of tries with the reader's backbone, in one captured pass."""

    def __init__(self, reader: Reader, capturer: Capturer) -> None:
        self.reader = reader
        self.view: TreeCache | None = None
        self.read = capturer.capture(self._read, "beam verification", reader.backbone.model, reader.not_capturable)

    def tries(self, cache: RaggedCache, tries: list[BeamTrie]) -> tuple[Features, Tensor]:
        """The features ``[B, N]`` of every new node, and the logits ``[B, N, V]`` of what follows it."""
        if self.view is None or self.view.groups != cache.groups:
            self.view = TreeCache(cache.groups)
        nodes = tensors(tries, cache.lengths_B.device)
        # Room for the longest trie in every row, since rows are moved together when it is cut down.
        room = max(trie.shared for trie in tries) + max(trie.read for trie in tries) + nodes.tokens_BN.shape[1]
        return self.read(cache.stores(room - cache.longest), nodes)

    def _read(self, stores: Stores, nodes: Nodes) -> tuple[Features, Tensor]:
        assert self.view is not None
        backbone = self.reader.backbone
        index_BN = nodes.shared_B[:, None] + nodes.places_BN
        positions_BN = nodes.positions_BM.gather(1, nodes.places_BN)
        slots = stores[0][0].shape[-2]
        attention_mask = masks_by_kind(positions_BN, nodes.positions_BM, nodes.ancestors_BNM, nodes.shared_B, slots, backbone.windows)
        features = backbone.read(nodes.tokens_BN, self.view.over(stores, index_BN), positions_BN, attention_mask, self.reader.taps)
        return features, backbone.readout(features.hidden_BTD)


def padded(nodes: int) -> int:
    """How many nodes are read where so many are wanted: a size that occurs often."""
    return next((size for size in SIZES if size >= nodes), -(-nodes // 16) * 16)


def tensors(tries: list[BeamTrie], device: torch.device) -> Nodes:
    """The new nodes of every row."""
    B, N = len(tries), padded(max(trie.new for trie in tries))
    M = -(-max(trie.read + N for trie in tries) // TRIE_STEP) * TRIE_STEP
    tokens, places, positions = np.empty((B, N), np.int64), np.empty((B, N), np.int64), np.empty((B, M), np.int64)
    ancestors = np.zeros((B, N, M), np.bool_)
    for b, trie in enumerate(tries):
        first, new, count = trie.read, trie.new, len(trie.tokens)
        tokens[b], positions[b] = trie.tokens[first], trie.shared + trie.depths[first]
        tokens[b, :new] = trie.tokens[first:]
        positions[b, :count] = trie.shared + np.array(trie.depths)
        places[b] = first + np.arange(N)
        above = trie.ancestors()
        ancestors[b, :, :count] = above[first]
        ancestors[b, :new, :count] = above[first:]
    shared = np.array([trie.shared for trie in tries])
    return Nodes(*(torch.from_numpy(one).to(device) for one in (tokens, places, positions, ancestors, shared)))
