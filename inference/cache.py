"""The backbone's cache while it decodes: ragged rows, tree keys behind each row's end, the accepted path moved into place.

A `transformers.Cache`, so any model writes to it as to its own. Sliding windows count logical positions and every layer
keeps all of its keys: a slot is a position. Shape suffixes: B batch, N tree nodes, P path, S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from headstart.heads.kv import RaggedKV, Slots, slots_behind, visible
from headstart.inference.tree import CandidateTree


class RaggedLayer(CacheLayerMixin):
    """One layer's keys and values; where new ones go is the cache's business."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self.cache, self.kv = cache, RaggedKV()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.kv.write(key_states, value_states, self.cache.slots)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.longest + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.longest

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """``lengths_B`` tokens of each row are in slots 0 .. length - 1; what lies behind them is overwritten by the next pass."""

    def __init__(self, num_layers: int, rows: int, device: torch.device) -> None:
        super().__init__(layers=[RaggedLayer(self) for _ in range(num_layers)])
        self.lengths_B = torch.zeros(rows, dtype=torch.int64, device=device)
        self.longest = 0
        self.slots: Slots = slots_behind(self.lengths_B, 0, 0)

    def expect(self, count: int) -> Tensor:
        """The next pass brings ``count`` tokens a row; their slots ``[B, count]``, which are positions for a run of text."""
        self.slots = slots_behind(self.lengths_B, self.longest, count)
        return self.slots.index_BN

    def extend(self, lengths_B: Tensor, longest: int) -> None:
        """The first ``lengths_B`` of the tokens just read are text."""
        self.lengths_B, self.longest = self.lengths_B + lengths_B, self.longest + longest

    def see(self, tree: CandidateTree, positions_BN: Tensor, windows: dict[str, int | None]) -> dict[str, Tensor] | None:
        """For each kind of layer, ``[B, N, S]`` where a node may look; None when a causal mask says the same."""
        B, N = tree.tokens_BN.shape
        if B == 1 and N == 1 and not any(windows.values()):
            return None
        allowed = visible(self.lengths_B, self.longest, tree.ancestors_BNN)
        if not any(windows.values()):
            return dict.fromkeys(windows, allowed)
        places_S = torch.arange(allowed.shape[-1], device=allowed.device)
        node_BS = (places_S - self.lengths_B[:, None]).clamp(0, N - 1)
        key_BS = torch.where(places_S < self.lengths_B[:, None], places_S, positions_BN.gather(1, node_BS))
        back_BNS = positions_BN[..., None] - key_BS[:, None]
        return {kind: allowed if window is None else allowed & (back_BNS < window) for kind, window in windows.items()}

    def keep(self, path_BP: Tensor, count_B: Tensor, longest: int) -> None:
        """Move the accepted path of each row right behind its end; ``longest``: the greatest length after that."""
        P = path_BP.shape[1]
        if P > 1:
            target = slots_behind(self.lengths_B, self.longest, P)
            source_BP = self.lengths_B[:, None] + path_BP
            for layer in self.layers:
                if layer.kv.keys is not None:
                    layer.kv.move(source_BP, target)
        self.lengths_B, self.longest = self.lengths_B + count_B, longest
