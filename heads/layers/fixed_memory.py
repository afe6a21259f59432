"""Memory whose layout cannot change under its holder, for the stores that captured passes read and write where they lie.

A CUDA graph keeps the addresses and strides with which it was recorded. So every store is the corner of a home, which may have room for
more rows and slots: a store of given sizes is always the same elements of memory. Only when a home is too small does a larger one take
its place; what was recorded on the other is then recorded again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from headstart.heads.layers.ragged import octave_up

LEAST = 1024
"""Slots of a new home, if `AHEAD` allows."""
AHEAD = 1 << 14
"""Positions of all rows for which a home has room before they are needed: 2 GB for an 8B model with 8 key heads."""


class FixedMemory:
    """The homes of one model's cache and of its drafters' states."""

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


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one dtype are the same elements in memory."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
