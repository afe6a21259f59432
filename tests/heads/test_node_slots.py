"""Drafted nodes attend to their row's past, their ancestors and themselves, whichever way the mask is made.

Shape suffixes: B batch, N nodes, M nodes so far, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig

from headstart.heads.kv.draft_cache import DraftCache, NodeSlots
from headstart.heads.layers.decoder_layer import Rotary

LENGTHS = (6, 1, 9)
CONFIG = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4)


def cache_of(dtype: torch.dtype) -> DraftCache:
    cache = DraftCache.empty(torch.zeros(len(LENGTHS), dtype=dtype), (2, 24, 4), Rotary(CONFIG), None, False)
    return DraftCache(cache.keys_BGSC, cache.values_BGSC, torch.tensor(LENGTHS), cache.rotation, cache.rotary)


def test_hidden_nodes_are_not_attended_to_from_below() -> None:
    cache, one = cache_of(torch.float32), torch.zeros(len(LENGTHS), 1, dtype=torch.int64)
    hidden_B = torch.tensor([True, False, True])
    root = NodeSlots.below(cache, None, one, 0, None)
    child = NodeSlots.below(cache, root.hidden(hidden_B), one, 1, None)

    def sees(nodes: NodeSlots, slots_BN: Tensor) -> list[bool]:
        return (nodes.mask_BNS.gather(2, slots_BN[..., None]) == 0).flatten().tolist()

    assert sees(root, root.slots_BN) == [True] * 3 and sees(child, child.slots_BN) == [True] * 3
    assert sees(child, root.slots_BN) == [False, True, False]
    assert (child.mask_BNS == 0).sum(-1).flatten().tolist() == [6 + 1, 1 + 2, 9 + 1]
