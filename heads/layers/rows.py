"""State by rows: what a drafter keeps, the stores of keys and values in it, and fixed memory for them.

A `RowState` is selected and joined by rows. A store ``[..., B, H, S, D]`` has the past of row b in slots 0 .. length_b - 1, then its
drafted nodes: rows may accept different numbers of tokens without padding or moving slots. The functions of stores copy nothing to the
host and branch on shapes only, so that they can be captured.

Shape suffixes: L layers, B batch, H heads, N nodes written, P positions moved, S slots, D head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from headstart.support.devices import is_accelerator
from headstart.support.pytree import map_tensors


def map_stores(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Apply ``change`` to every store of a state (`RowState.stored`); other tensors are kept."""
    if isinstance(state, tuple | list):
        return type(state)(map_stores(change, part) for part in state)
    if not is_dataclass(state) or isinstance(state, type):
        return state
    stored = getattr(state, "stored", ())
    values = {member.name: getattr(state, member.name) for member in fields(state)}
    return replace(state, **{name: (map_tensors if name in stored else map_stores)(change, value) for name, value in values.items()})


def list_stores(state: Any) -> list[Tensor]:
    stores: list[Tensor] = []

    def note(store: Tensor) -> Tensor:
        stores.append(store)
        return store

    map_stores(note, state)
    return stores


Change = Callable[..., Any]


def drafted() -> Any:
    """Declare a field about drafted nodes: None until nodes are drafted, and reset to None by `select`, `join` and `reserve`."""
    return field(default=None, metadata={"drafted": True})


@dataclass(frozen=True)
class RowState:
    """Fields are tensors ``[B, ...]``, row states, tuples of either, or None if not set yet."""

    stored: ClassVar[tuple[str, ...]] = ()
    """Fields of stores: large tensors, written in place or not at all, which captured calls need where they were before."""

    def select(self, rows_B: Tensor) -> Self:
        """Select the rows ``rows_B`` (int64), in that order; rows may be repeated."""
        return self._changed(lambda state: state.select(rows_B), lambda tensor: tensor[rows_B], lambda store: select_rows(store, rows_B))

    def join(self, other: Self) -> Self:
        """Append the rows of another state."""
        return self._changed(lambda *states: states[0].join(states[1]), lambda *tensors: torch.cat(tensors), join_rows, other)

    def reserve(self, length: int) -> Self:
        """Return the state with capacity for ``length`` positions per row, nodes to draft included, and without those drafted before."""
        return self._changed(lambda state: state.reserve(length), lambda tensor: tensor, lambda store: grown(store, length))

    def _changed(self, of_state: Change, of_tensor: Change, of_store: Change, *others: Self) -> Self:
        """Change every field that is set, with those of ``others``; the fields about drafted nodes are no longer set."""
        changed: dict[str, Any] = {}
        for member in fields(self):
            values = [getattr(state, member.name) for state in (self, *others)]
            if "drafted" in member.metadata or values[0] is None:
                changed[member.name] = None
            else:
                changed[member.name] = _changed_each(of_state, of_store if member.name in self.stored else of_tensor, *values)
        return replace(self, **changed)


def _changed_each(of_state: Change, of_tensor: Change, *values: Any) -> Any:
    if isinstance(values[0], tuple):
        return tuple(_changed_each(of_state, of_tensor, *parts) for parts in zip(*values, strict=True))
    return (of_state if isinstance(values[0], RowState) else of_tensor)(*values)


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
    if store_BHSD.shape[0] == 1:
        store_BHSD.index_copy_(2, index_BN[0], new_BHND)
    else:  # not scatter_, which moves single numbers: in bf16 on a CPU a hundred times slower to move. Nor a view: compilers would copy
        torch.ops.aten.index_put_(store_BHSD, [_rows(index_BN), None, index_BN], new_BHND.transpose(1, 2))


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


def join_rows(rows: Tensor, other: Tensor) -> Tensor:
    """Concatenate the rows of two stores, with as many slots as the larger has."""
    slots = max(rows.shape[-2], other.shape[-2])
    return _pinned_as(rows, torch.cat([sized(rows, slots), sized(other, slots)], -4))


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


LEAST = 1024
"""Slots of a new home, if `AHEAD` allows."""
AHEAD = 1 << 14
"""Positions of all rows for which a home has room before they are needed: 2 GB for an 8B model with 8 key heads."""


class FixedMemory:
    """The homes of one model's cache and of its drafters' states, in which no layout changes under its holder.

    A CUDA graph keeps the addresses and strides with which it was recorded. So every store is the corner of a home, which may have room for
    more rows and slots: a store of given sizes is always the same elements of memory. Only when a home is too small does a larger one take
    its place; what was recorded on the other is then recorded again.
    """

    def __init__(self) -> None:
        self.positions = 0
        """Positions that a row may reach in this call: new homes have room for them, within `AHEAD`, so that they need not grow."""
        self._homes: dict[tuple[str, int], Tensor] = {}

    def holds(self, tensor: Tensor) -> bool:
        """True if the tensor lies in this memory."""
        address = tensor.untyped_storage().data_ptr()
        return any(home.untyped_storage().data_ptr() == address for home in self._homes.values())

    def place(self, holder: str, stores: Sequence[Tensor], slots: bool = True) -> list[Tensor]:
        """Return a holder's stores as corners of their homes, copied there unless they are there already.

        ``slots``: they are ``[..., S, C]`` with S slots (``[..., B, G, S, C]`` if they have rows), of which more will be needed.
        """
        homes = [self._home((holder, i), store, slots) for i, store in enumerate(stores)]
        corners = [home[tuple(map(slice, store.shape))] for home, store in zip(homes, stores, strict=True)]
        moved = [(corner, store) for corner, store in zip(corners, stores, strict=True) if not is_same_memory(corner, store)]
        # What lies elsewhere in this memory is copied aside first, since its place may be overwritten.
        aside = [store.clone() if self.holds(store) else store for _, store in moved]
        for (corner, _), store in zip(moved, aside, strict=True):
            corner.copy_(store)
        return corners

    def _home(self, key: tuple[str, int], store: Tensor, slots: bool) -> Tensor:
        home, sizes = self._homes.get(key), list(store.shape)
        if home is not None and (home.dtype, home.device, home.dim()) == (store.dtype, store.device, store.dim()):
            sizes = [*map(max, sizes, home.shape)]
            if sizes == list(home.shape):
                return home
        if slots and store.dim() > 1:
            rows = sizes[-4] if store.dim() > 3 else 1
            sizes[-2] = max(sizes[-2], min(octave_up(max(self.positions, LEAST)), AHEAD // rows))
        self._homes[key] = store.new_zeros(sizes)
        return self._homes[key]


def is_same_memory(tensor: Tensor, other: Tensor) -> bool:
    """True if two tensors of one dtype are the same elements in memory."""
    return tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape and tensor.stride() == other.stride()
