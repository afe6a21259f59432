"""Keys and values of ragged rows ``[..., B, H, S, D]``: row b has its past in slots 0 .. length_b - 1, then its drafted nodes.

Rows may accept different numbers of tokens without padding or moving slots. These functions copy nothing to the host and branch on
shapes only, so that they can be captured.

Shape suffixes: L layers, B batch, H heads, N nodes written, P positions moved, S slots, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from headstart.support.devices import is_accelerator

STEP = 64
"""Capacities are multiples of this, so that few shapes occur."""

MAX_COARSE = 1024
"""Capacities on an accelerator are powers of two up to this, then multiples of it."""
MAX_ROWS = 64
"""Numbers of rows in fixed memory are powers of two up to this, then multiples of it."""


def whole_steps(slots: int) -> int:
    """Round up to a multiple of `STEP`."""
    return -(-slots // STEP) * STEP


def rounded_up(slots: int, device: torch.device) -> int:
    """The number of slots that a pass attends to: a multiple of `STEP` on a CPU; on an accelerator a power of two or a multiple of 1,024.

    Fewer sizes occur on an accelerator, where each loads kernels and unused slots cost little.
    """
    if not is_accelerator(device):
        return whole_steps(slots)
    return -(-slots // MAX_COARSE) * MAX_COARSE if slots > MAX_COARSE else octave_up(slots)


def octave_up(slots: int) -> int:
    """The number of slots where each is captured apart: `STEP` or a larger power of two."""
    return max(STEP, 1 << (slots - 1).bit_length())


def padded_rows(rows: int) -> int:
    """The number of rows where each is captured apart: a power of two, above 64 a multiple of it."""
    return 1 << (rows - 1).bit_length() if rows <= MAX_ROWS else -(-rows // MAX_ROWS) * MAX_ROWS


def pad_rows(tensor: Tensor, rows: int, dim: int = 0) -> Tensor:
    """Repeat the last row until there are ``rows``."""
    missing = rows - tensor.shape[dim]
    return torch.cat([tensor, tensor.narrow(dim, -1, 1).repeat_interleave(missing, dim)], dim) if missing > 0 else tensor


def put(store_BHSD: Tensor, new_BHND: Tensor, index_BN: Tensor) -> None:
    """Write N entries of each row into their slots, in place."""
    if isinstance(store_BHSD, FakeTensor):   # traced for a compiler, which writes in place what is no view of its own
        torch.ops.aten.index_put_(store_BHSD, [_rows(index_BN), None, index_BN], new_BHND.transpose(1, 2))
    elif store_BHSD.shape[0] == 1:
        store_BHSD.index_copy_(2, index_BN[0], new_BHND)
    else:   # not scatter_, which moves single numbers: in bf16 on a CPU a hundred times slower to move
        store_BHSD.transpose(1, 2)[_rows(index_BN), index_BN] = new_BHND.transpose(1, 2)


def move(store_LBHSD: Tensor, source_BP: Tensor, target_BP: Tensor) -> None:
    """Copy P entries of each row to other slots of the row, in place."""
    if store_LBHSD.shape[1] == 1:
        store_LBHSD.index_copy_(3, target_BP[0], store_LBHSD.index_select(3, source_BP[0]))
    else:
        store_LBSHD, rows_B1 = store_LBHSD.transpose(2, 3), _rows(source_BP)
        store_LBSHD[:, rows_B1, target_BP] = store_LBSHD[:, rows_B1, source_BP]


def _rows(index_BN: Tensor) -> Tensor:
    """The number of each row: ``[B, 1]``."""
    return torch.arange(index_BN.shape[0], device=index_BN.device)[:, None]


def sized(store: Tensor, slots: int) -> Tensor:
    """Return the store with exactly ``slots`` slots; contents are kept as far as they fit."""
    have = store.shape[-2]
    if have == slots:
        return store
    other = store.new_zeros(*store.shape[:-2], slots, store.shape[-1], pin_memory=store.is_pinned())
    other[..., : min(have, slots), :] = store[..., :slots, :]
    return other


def grown(store: Tensor, slots: int) -> Tensor:
    """Return the store with at least ``slots`` slots; it about doubles, so that growing is cheap on average."""
    have = store.shape[-2]
    if is_accelerator(store.device):
        return sized(store, max(have, octave_up(slots)))
    return store if have >= slots else sized(store, whole_steps(max(slots, 2 * have)))


def select_rows(store: Tensor, rows_B: Tensor) -> Tensor:
    """Select the rows ``rows_B`` (int64) of a store, in that order."""
    return _pinned_as(store, store.index_select(-4, rows_B.to(store.device)))


def join_rows(one: Tensor, other: Tensor) -> Tensor:
    """Concatenate the rows of two stores, with as many slots as the larger has."""
    slots = max(one.shape[-2], other.shape[-2])
    return _pinned_as(one, torch.cat([sized(one, slots), sized(other, slots)], -4))


def replace_rows(store: Tensor, rows: list[int], other: Tensor) -> Tensor:
    """Return the store with the rows of ``other`` in the places of ``rows``; in place, unless that needs more slots."""
    slots = other.shape[-2]
    store = grown(store, slots)
    for row, new in zip(rows, other.unbind(-4), strict=True):
        store.select(-4, row)[..., :slots, :] = new
    return store


def _pinned_as(like: Tensor, store: Tensor) -> Tensor:
    """Pin ``store`` if ``like`` is pinned, for fast copies to an accelerator."""
    return store.pin_memory() if like.is_pinned() else store
