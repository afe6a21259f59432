"""Where drafted nodes are stored in a layer's KV cache, and what they attend to.

Nodes are drafted level by level. A node attends to what its parent attends to and to itself, so each level's mask follows from that of the
level above in two operations. On an accelerator a draft's small operations take longer than reading the weights.

Shape suffixes: B batch, N nodes, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.heads.layers.draft_cache import DraftCache
from headstart.heads.layers.row_state import RowState
from headstart.heads.layers.tree_mask import visible_slots


@dataclass(frozen=True)
class NodeSlots(RowState):
    """The N nodes drafted last."""

    slots_BN: Tensor
    mask_BNS: Tensor
    """Added to the attention scores: 0 where a node attends, elsewhere the smallest number of the cache's dtype."""
    positions_BS: Tensor | None = None
    """With a sliding window, the position of each slot's entry."""

    @staticmethod
    def below(cache: DraftCache, above: NodeSlots | None, parents_BN: Tensor, offset: int, window: int | None) -> NodeSlots:
        """Return the slots of the next level's nodes, and their ancestors as what they attend to.

        ``above``: the previous level (None: this is the first); ``parents_BN`` are the parents' indices in it. ``offset``: the nodes'
        position, counted from the row's end. ``window``: a node attends to this many positions up to its own (None: all).
        """
        cache = cache.on_device()
        places_N, positions_BS = torch.arange(parents_BN.shape[1], device=parents_BN.device), None
        if above is None:
            slots_BN = cache.ends_B[:, None] + places_N
            mask_BNS = additive(past_mask(cache)[:, None], cache.keys_BGSC.dtype).expand(-1, len(places_N), -1)
        else:
            slots_BN = above.slots_BN[:, -1:] + 1 + places_N
            mask_BNS = above.mask_BNS.gather(1, parents_BN[..., None].expand(-1, -1, cache.slots))
        mask_BNS = mask_BNS.scatter(2, slots_BN[..., None], 0.0)
        if window is not None:
            position_B1 = cache.lengths_B[:, None] + offset
            known_BS = cache.positions_BS if above is None or above.positions_BS is None else above.positions_BS
            positions_BS = known_BS.scatter(1, slots_BN, position_B1.expand_as(slots_BN))
            mask_BNS = mask_BNS.masked_fill((positions_BS <= position_B1 - window)[:, None], torch.finfo(mask_BNS.dtype).min)
        return NodeSlots(slots_BN, mask_BNS, positions_BS)

    @staticmethod
    def block(cache: DraftCache, seen_BNN: Tensor) -> NodeSlots:
        """Return the slots of nodes drafted at once, which attend to each other where ``seen_BNN`` is True."""
        cache = cache.on_device()
        slots_BN = cache.ends_B[:, None] + torch.arange(seen_BNN.shape[1], device=seen_BNN.device)
        return NodeSlots(slots_BN, additive(visible_slots(cache.ends_B, seen_BNN, cache.slots), cache.keys_BGSC.dtype))

    def hidden(self, rows_B: Tensor) -> NodeSlots:
        """Return the nodes, of these rows (boolean) as nodes that those below do not attend to."""
        value_BN1 = additive(~rows_B, self.mask_BNS.dtype)[:, None, None].expand(-1, self.slots_BN.shape[1], -1)
        return replace(self, mask_BNS=self.mask_BNS.scatter(2, self.slots_BN[..., None], value_BN1))


def past_mask(cache: DraftCache) -> Tensor:
    """Return the mask ``[B, S]``, True at the slots of a row's entries."""
    return torch.arange(cache.slots, device=cache.lengths_B.device) < cache.ends_B[:, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as numbers to add to attention scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
