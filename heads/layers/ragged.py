"""Keys and values of ragged rows ``[..., B, H, S, D]``: row b keeps its past in slots 0 .. length_b - 1, drafted nodes behind it.

Nothing is padded or re-aligned when rows accept different numbers of tokens: lengths differ, slots do not move. These functions read
nothing on the host and branch on shapes alone, so that they can be captured.

Shape suffixes: L layers, B batch, H heads, N nodes written, P positions moved, S slots, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 64
"""Slots are added in steps, so that few shapes occur."""


def whole_steps(slots: int) -> int:
    """The next multiple of `STEP`."""
    return -(-slots // STEP) * STEP


def put(store_BHSD: Tensor, new_BHND: Tensor, index_BN: Tensor) -> None:
    """Write N entries of each row into their slots, in place."""
    B, H, _, D = store_BHSD.shape
    if B == 1:
        store_BHSD.index_copy_(2, index_BN[0], new_BHND)
    else:
        store_BHSD.scatter_(2, index_BN[:, None, :, None].expand(-1, H, -1, D), new_BHND)


def move(store_LBHSD: Tensor, source_BP: Tensor, target_BP: Tensor) -> None:
    """Copy P entries of each row to other slots of that row, in place."""
    L, B, H, _, D = store_LBHSD.shape
    if B == 1:
        store_LBHSD.index_copy_(3, target_BP[0], store_LBHSD.index_select(3, source_BP[0]))
        return
    index = source_BP[None, :, None, :, None].expand(L, -1, H, -1, D)
    store_LBHSD.scatter_(3, target_BP[None, :, None, :, None].expand(L, -1, H, -1, D), store_LBHSD.gather(3, index))


def sized(store: Tensor, slots: int) -> Tensor:
    """The store with exactly ``slots`` slots, the first of which keep their contents."""
    have = store.shape[-2]
    if have == slots:
        return store
    other = store.new_zeros(*store.shape[:-2], slots, store.shape[-1], pin_memory=store.is_pinned())
    other[..., : min(have, slots), :] = store[..., :slots, :]
    return other


def grown(store: Tensor, slots: int) -> Tensor:
    """The store with at least ``slots`` slots; it doubles, so that growing stays cheap."""
    have = store.shape[-2]
    return store if have >= slots else sized(store, whole_steps(max(slots, 2 * have)))


def select_rows(store: Tensor, rows_B: Tensor) -> Tensor:
    """The rows ``rows_B`` (int64) of a store, in that order."""
    return _pinned_as(store, store.index_select(-4, rows_B.to(store.device)))


def join_rows(one: Tensor, other: Tensor) -> Tensor:
    """The rows of two stores, the other's behind; as many slots as the larger has."""
    slots = max(one.shape[-2], other.shape[-2])
    return _pinned_as(one, torch.cat([sized(one, slots), sized(other, slots)], -4))


def _pinned_as(like: Tensor, store: Tensor) -> Tensor:
    """In pinned memory if the other store is, so that it moves to an accelerator at full speed."""
    return store.pin_memory() if like.is_pinned() else store
