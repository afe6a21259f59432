"""Drafted nodes attend to their row's past, their ancestors and themselves, whichever way the mask is made.

Shape suffixes: B batch, N nodes, M nodes so far, S slots.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from headstart.heads.kv.draft_cache import DraftCache, NodeSlots
from headstart.heads.kv.tree_mask import extend_ancestors, masks_by_kind
from headstart.heads.layers.decoder_layer import Rotary

LENGTHS = (6, 1, 9)
CONFIG = LlamaConfig(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4)


def cache_of(dtype: torch.dtype) -> DraftCache:
    cache = DraftCache.empty(torch.zeros(len(LENGTHS), dtype=dtype), (2, 24, 4), Rotary(CONFIG), None, False)
    return DraftCache(cache.keys_BGSC, cache.values_BGSC, torch.tensor(LENGTHS), cache.rotation, cache.rotary)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_levels_attend_to_their_ancestors(window: int | None, dtype: torch.dtype) -> None:
    """Against the masks of the backbone's passes, level by level, deeper than the window."""
    torch.manual_seed(0)
    cache, nodes, ancestors_BNM, levels = cache_of(dtype), None, None, []
    for level, (above, width) in enumerate([(1, 1), (1, 3), (3, 4), (4, 2), (2, 3), (3, 1), (1, 2)]):
        parents_BN = torch.randint(above, (len(LENGTHS), width))
        nodes = NodeSlots.below(cache, nodes, parents_BN, level, window)
        ancestors_BNM = extend_ancestors(ancestors_BNM, parents_BN)
        levels += [level] * width
        positions_BM = cache.lengths_B[:, None] + torch.tensor(levels)
        masks = masks_by_kind(positions_BM[:, -width:], positions_BM, ancestors_BNM, cache.lengths_B, cache.slots, {"a": window, "b": None})
        assert nodes.mask_BNS.dtype == dtype and torch.equal(nodes.mask_BNS == 0, masks["a"])
        assert (nodes.mask_BNS[~masks["a"]] == torch.finfo(dtype).min).all()
        assert torch.equal(nodes.slots_BN, cache.lengths_B[:, None] + torch.arange(len(levels) - width, len(levels)))


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
