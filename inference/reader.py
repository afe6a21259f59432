"""The backbone reading: prompts as they come, trees behind them through a mask, in one captured pass.

Shape suffixes: B batch, T positions, N tree nodes, S slots, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from headstart.heads.backbone import Backbone
from headstart.heads.base import Features
from headstart.heads.kv import visible
from headstart.inference.cache import RaggedCache, Stores, TreeCache
from headstart.inference.capture import Captured, When, capturable
from headstart.inference.tree import CandidateTree


class Reader:
    """One backbone, read with the taps of one drafter; its recordings serve every text."""

    def __init__(self, backbone: Backbone, taps: tuple[int, ...], capture: When) -> None:
        self.backbone, self.taps = backbone, taps
        self.view: TreeCache | None = None
        self.read = Captured(self._read, capture if capturable(capture, backbone.device) else "never")

    def prompts(self, tokens_BT: Tensor, lengths_B: Tensor) -> tuple[Features, RaggedCache]:
        """Rows right-padded: their features (padding marked so), and the cache to go on from."""
        B, T = tokens_BT.shape
        cache = DynamicCache()   # without the model's configuration: a sliding layer keeps all of its keys
        place_BT = torch.arange(T, device=tokens_BT.device).expand(B, T)
        features = self.backbone.read(tokens_BT, cache, place_BT, taps=self.taps)
        ragged = RaggedCache([(layer.keys, layer.values) for layer in cache.layers], lengths_B)
        return features.gather(place_BT, place_BT < lengths_B[:, None]) if B > 1 else features, ragged

    def tree(self, cache: RaggedCache, tree: CandidateTree) -> tuple[Features, Tensor]:
        """The features of every node, and the logits ``[B, N, V]`` of what follows it."""
        if self.view is None or len(self.view.layers) != sum(map(len, cache.groups)):
            self.view = TreeCache(cache.groups)
        nodes = tree.tensors(cache.lengths_B.device)
        return self.read(cache.stores(tree.size), *nodes, cache.lengths_B)

    def _read(
        self, stores: Stores, tokens_BN: Tensor, depths_BN: Tensor, ancestors_BNN: Tensor, lengths_B: Tensor
    ) -> tuple[Features, Tensor]:
        assert self.view is not None
        index_BN = lengths_B[:, None] + torch.arange(tokens_BN.shape[1], device=lengths_B.device)
        positions_BN = lengths_B[:, None] + depths_BN
        see = masks(positions_BN, ancestors_BNN, lengths_B, stores[0][0].shape[-2], self.backbone.windows)
        features = self.backbone.read(tokens_BN, self.view.over(stores, index_BN), positions_BN, see, self.taps)
        return features, self.backbone.readout(features.hidden_BTD)


def masks(
    positions_BN: Tensor, ancestors_BNN: Tensor, lengths_B: Tensor, slots: int, windows: dict[str, int | None]
) -> dict[str, Tensor]:
    """For each kind of layer, ``[B, N, slots]``: where a node may look."""
    allowed = visible(lengths_B, ancestors_BNN, slots)
    if not any(windows.values()):
        return dict.fromkeys(windows, allowed)
    places_S = torch.arange(slots, device=lengths_B.device)
    node_BS = (places_S - lengths_B[:, None]).clamp(min=0).clamp(max=positions_BN.shape[1] - 1)
    key_BS = torch.where(places_S < lengths_B[:, None], places_S, positions_BN.gather(1, node_BS))
    back_BNS = positions_BN[..., None] - key_BS[:, None]
    return {kind: allowed if window is None else allowed & (back_BNS < window) for kind, window in windows.items()}
