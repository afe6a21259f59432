"""Keys and values of ragged rows: row b keeps its past in slots 0 .. length_b - 1, drafted nodes go behind it.

Nothing is padded or re-aligned when rows accept different numbers of tokens: lengths differ, slots do not move.

Shape suffixes: B batch, H heads, N nodes written, S slots, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """Where N entries of each row go: ``index_BN``, or from ``start`` on when all rows agree; ``reach`` is the last slot + 1."""

    index_BN: Tensor
    reach: int
    start: int | None


def slots_behind(lengths_B: Tensor, longest: int, count: int, shift: int = 0) -> Slots:
    """The ``count`` slots behind each row's end (``shift`` further on). ``longest`` is the greatest length, known to the host."""
    index = (lengths_B + shift)[:, None] + torch.arange(count, device=lengths_B.device)
    start = longest + shift if lengths_B.shape[0] == 1 else None
    return Slots(index, longest + shift + count, start)


class RaggedKV:
    """One attention layer's keys and values ``[B, H, S, D]``, in buffers that double when they are full."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def write(self, keys_BHND: Tensor, values_BHND: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """Put N entries in their slots; all keys and values up to ``slots.reach`` (views)."""
        self.keys = _put(self.keys, keys_BHND, slots)
        self.values = _put(self.values, values_BHND, slots)
        return self.keys[:, :, : slots.reach], self.values[:, :, : slots.reach]

    def move(self, source_BN: Tensor, target: Slots) -> None:
        """Copy the entries of ``source_BN`` into the target slots."""
        assert self.keys is not None and self.values is not None
        for store in (self.keys, self.values):
            if target.start is not None:
                store[:, :, target.start : target.reach] = store[:, :, source_BN[0]]
            else:
                B, H, _, D = store.shape
                index = source_BN[:, None, :, None].expand(B, H, -1, D)
                store.scatter_(2, target.index_BN[:, None, :, None].expand(B, H, -1, D), store.gather(2, index))


def _put(store: Tensor | None, new_BHND: Tensor, slots: Slots) -> Tensor:
    B, H, N, D = new_BHND.shape
    if store is None or store.shape[2] < slots.reach:
        grown = new_BHND.new_zeros(B, H, max(64, 2 * slots.reach), D)
        if store is not None:
            grown[:, :, : store.shape[2]] = store
        store = grown
    if slots.start is not None:
        store[:, :, slots.start : slots.start + N] = new_BHND
    else:
        store.scatter_(2, slots.index_BN[:, None, :, None].expand(B, H, N, D), new_BHND)
    return store


def visible(lengths_B: Tensor, longest: int, ancestors_BNM: Tensor) -> Tensor:
    """``[B, N, longest + M]``, True where node n may look: its row's past, and those of the M written nodes it descends from.

    ``ancestors_BNM`` counts a node among its own ancestors; node m of row b lies in slot ``length_b + m``.
    """
    B, N, M = ancestors_BNM.shape
    if B == 1:
        return torch.cat([ancestors_BNM.new_ones(1, N, longest), ancestors_BNM], -1)
    place_BS = torch.arange(longest + M, device=lengths_B.device) - lengths_B[:, None]
    node_BNS = place_BS.clamp(0, M - 1)[:, None].expand(B, N, -1)
    written_BS = (place_BS >= 0) & (place_BS < M)
    return (place_BS < 0)[:, None] | (ancestors_BNM.gather(2, node_BNS) & written_BS[:, None])
