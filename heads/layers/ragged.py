"""Keys and values of ragged rows: row b keeps its past in slots 0 .. length_b - 1, drafted nodes go behind it.

Nothing is padded or re-aligned when rows accept different numbers of tokens: lengths differ, slots do not move. What is here
reads nothing back to the host and branches on shapes alone, so that it can be captured and replayed.

Shape suffixes: B batch, H heads, N nodes written, M nodes there, S slots, D head width.
"""

from __future__ import annotations

from torch import Tensor

STEP = 64
"""Slots are made in steps, so that few shapes occur."""


def whole_steps(slots: int) -> int:
    """The next multiple of `STEP`."""
    return -(-slots // STEP) * STEP


def put(store_BHSD: Tensor, new_BHND: Tensor, index_BN: Tensor) -> None:
    """Write N entries of each row into their slots."""
    B, H, _, D = store_BHSD.shape
    if B == 1:
        store_BHSD.index_copy_(2, index_BN[0], new_BHND)
    else:
        store_BHSD.scatter_(2, index_BN[:, None, :, None].expand(-1, H, -1, D), new_BHND)


def sized(store: Tensor, slots: int) -> Tensor:
    """The store ``[..., S, D]`` with exactly so many slots, the first of which hold what they held."""
    have = store.shape[-2]
    if have == slots:
        return store
    other = store.new_zeros(*store.shape[:-2], slots, store.shape[-1], pin_memory=store.is_pinned())
    other[..., : min(have, slots), :] = store[..., :slots, :]
    return other


def grown(store: Tensor, slots: int) -> Tensor:
    """The store ``[..., S, D]`` with at least ``slots`` slots; it doubles, so that growing stays cheap."""
    have = store.shape[-2]
    return store if have >= slots else sized(store, whole_steps(max(slots, 2 * have)))
