"""The texts of a row that beam search has in flight, as one trie: what all share is read once, what a beam drafts hangs below it.

The cache of a row holds the keys of what all its beams share, in slots that are positions, and behind it those of the trie's nodes,
each in the slot of its number. Nodes that no beam has for an ancestor are dropped after every pass.

Shape suffixes: B batch, N nodes read now, M nodes of the trie (these among them), S slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.heads.base import Features
from headstart.heads.kv import visible
from headstart.inference.cache import RaggedCache, Stores, TreeCache
from headstart.inference.capture import Captured, When, capturable
from headstart.inference.costs import SIZES
from headstart.inference.reader import Reader

TRIE_STEP = 16
"""Tries are padded to multiples of it, so that few shapes occur."""


class Forest:
    """One row. A parent stands before its children; parent -1 is the end of what all beams share. Nodes from ``read`` on are new."""

    def __init__(self, shared: int) -> None:
        self.shared = shared
        """Tokens, the prompt's among them, that every beam begins with."""
        self.told: list[int] = []
        """Those of them that are not the prompt's."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.read = 0
        self._place: dict[tuple[int, int], int] = {}

    @property
    def new(self) -> int:
        """How many nodes have not been read."""
        return len(self.tokens) - self.read

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

    def keep(self, last: list[int]) -> tuple[list[int], list[int]]:
        """Drop all but the paths to these nodes, which are of one depth; what was kept, by old number, and the new numbers of ``last``."""
        kept = sorted({node for end in set(last) for node in self.path(end)})
        depths = [self.depths[node] for node in kept]
        common = next((i for i, depth in enumerate(depths) if depths.count(depth) > 1), len(kept))
        self.told += [self.tokens[node] for node in kept[:common]]
        place = {node: i - common for i, node in enumerate(kept)}
        place |= dict.fromkeys([-1, *kept[:common]], -1)
        old_tokens, old_parents = self.tokens, self.parents
        self.shared += common
        self.tokens, self.parents, self.depths, self._place = [], [], [], {}
        for node in kept[common:]:
            self.add(place[old_parents[node]], old_tokens[node])
        self.read = len(self.tokens)
        return kept, [place[node] for node in last]

    def ancestors(self) -> np.ndarray:
        """``[M, M]``, True where the second node is an ancestor of the first, or the first itself."""
        found = np.eye(len(self.tokens), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                found[node] |= found[parent]
        return found


@dataclass(frozen=True)
class Nodes:
    """What a pass reads, as tensors; a row with fewer nodes has its first new one again at the end."""

    tokens_BN: Tensor
    places_BN: Tensor
    """Their numbers in the trie."""
    positions_BM: Tensor
    ancestors_BNM: Tensor
    shared_B: Tensor


class ForestReader:
    """Reads the new nodes of tries with the reader's backbone, in one captured pass."""

    def __init__(self, reader: Reader, capture: When) -> None:
        self.reader = reader
        self.view: TreeCache | None = None
        self.read = Captured(self._read, capture if capturable(capture, reader.backbone.device) else "never")

    def forests(self, cache: RaggedCache, forests: list[Forest]) -> tuple[Features, Tensor]:
        """The features ``[B, N]`` of every new node, and the logits ``[B, N, V]`` of what follows it."""
        if self.view is None or len(self.view.layers) != sum(map(len, cache.groups)):
            self.view = TreeCache(cache.groups)
        nodes = tensors(forests, cache.lengths_B.device)
        return self.read(cache.stores(nodes.tokens_BN.shape[1]), nodes)

    def _read(self, stores: Stores, nodes: Nodes) -> tuple[Features, Tensor]:
        assert self.view is not None
        backbone = self.reader.backbone
        index_BN = nodes.shared_B[:, None] + nodes.places_BN
        positions_BN = nodes.positions_BM.gather(1, nodes.places_BN)
        see = masks(nodes, positions_BN, stores[0][0].shape[-2], backbone.windows)
        features = backbone.read(nodes.tokens_BN, self.view.over(stores, index_BN), positions_BN, see, self.reader.taps)
        return features, backbone.readout(features.hidden_BTD)


def padded(nodes: int) -> int:
    """How many nodes are read where so many are wanted: a size that occurs often."""
    return next((size for size in SIZES if size >= nodes), -(-nodes // TRIE_STEP) * TRIE_STEP)


def tensors(forests: list[Forest], device: torch.device) -> Nodes:
    """The new nodes of every row."""
    B, N = len(forests), padded(max(forest.new for forest in forests))
    M = -(-max(forest.read + N for forest in forests) // TRIE_STEP) * TRIE_STEP
    tokens, places, positions = np.empty((B, N), np.int64), np.empty((B, N), np.int64), np.empty((B, M), np.int64)
    ancestors = np.zeros((B, N, M), np.bool_)
    for b, forest in enumerate(forests):
        first, new, count = forest.read, forest.new, len(forest.tokens)
        tokens[b], positions[b] = forest.tokens[first], forest.shared + forest.depths[first]
        tokens[b, :new] = forest.tokens[first:]
        positions[b, :count] = forest.shared + np.array(forest.depths)
        places[b] = first + np.arange(N)
        above = forest.ancestors()
        ancestors[b, :, :count] = above[first]
        ancestors[b, :new, :count] = above[first:]
    shared = [forest.shared for forest in forests]
    return Nodes(*(torch.from_numpy(one).to(device) for one in (tokens, places, positions, ancestors)), torch.tensor(shared, device=device))


def masks(nodes: Nodes, positions_BN: Tensor, slots: int, windows: dict[str, int | None]) -> dict[str, Tensor]:
    """For each kind of layer, ``[B, N, slots]``: where a node may look."""
    shared_B1 = nodes.shared_B[:, None]
    allowed = visible(nodes.shared_B, nodes.ancestors_BNM, slots)
    if not any(windows.values()):
        return dict.fromkeys(windows, allowed)
    places_S = torch.arange(slots, device=shared_B1.device)
    node_BS = (places_S - shared_B1).clamp(min=0).clamp(max=nodes.positions_BM.shape[1] - 1)
    key_BS = torch.where(places_S < shared_B1, places_S, nodes.positions_BM.gather(1, node_BS))
    back_BNS = positions_BN[..., None] - key_BS[:, None]
    return {kind: allowed if window is None else allowed & (back_BNS < window) for kind, window in windows.items()}
