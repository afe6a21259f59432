"""KV cache of a drafter's layer: the keys and values of all positions, or of a bounded number of them.

The entry of position p keeps that position whatever slot it lies in. Without a `Ring` that is slot p, and room grows with the sequence.
With one, the first positions have slots of their own and the others share as many slots as the window is long (attention sinks,
2309.17453); this changes what is drafted, never what is written. Drafted nodes lie behind a row's entries, and the next entries
overwrite them. The cache may live in host memory: then a draft works on a copy, which is dropped after it.

Shape suffixes: B batch, G heads of keys, S slots, T new positions, C head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.heads.layers.decoder_layer import Frequencies, Rotary, Rotation, rotary_at
from headstart.heads.layers.ragged import grown, join_rows, put, select_rows, sized, whole_steps
from headstart.heads.layers.row_state import RowState


@dataclass(frozen=True)
class Ring:
    """A row keeps its first ``sink`` positions and its last ``window``."""

    window: int
    sink: int

    @property
    def slots(self) -> int:
        """The most positions a row keeps."""
        return self.window + self.sink

    def kept(self, counts_B: Tensor) -> Tensor:
        """Indices among ``counts_B`` new positions of those that may be kept: int64 ``[B, slots]``, some twice."""
        first_S = torch.arange(self.sink, device=counts_B.device)
        last_BS = counts_B[:, None] - self.window + torch.arange(self.window, device=counts_B.device)
        return torch.cat([first_S.expand(len(counts_B), -1), last_BS], 1).clamp(min=0)

    def slots_of(self, positions_BT: Tensor, ends_B: Tensor) -> Tensor:
        """Slots of positions once rows have ``ends_B`` of them. What is too old and what is padding go where drafted nodes will lie."""
        ends_B1 = ends_B[:, None]
        old_BT = (positions_BT >= self.sink) & (positions_BT < ends_B1 - self.window)
        padding_BT = positions_BT >= ends_B1.clamp(min=self.slots)
        ring_BT = torch.where(positions_BT < self.sink, positions_BT, self.sink + (positions_BT - self.sink) % self.window)
        return torch.where(old_BT | padding_BT, self.slots, ring_BT)


@dataclass(frozen=True)
class DraftCache(RowState):
    """Keys and values of rows of different lengths."""

    keys_BGSC: Tensor
    values_BGSC: Tensor
    lengths_B: Tensor
    """Positions of each row, including those that are no longer kept."""
    rotation: Rotation | Frequencies
    """Of all positions there is room for."""
    rotary: Rotary
    ring: Ring | None = None
    home: tuple[Tensor, Tensor] | None = None
    """During a draft: the keys and values in host memory that the others are a copy of."""

    @staticmethod
    def empty(like_B: Tensor, shape: tuple[int, int, int], rotary: Rotary, ring: Ring | None, offload: bool) -> DraftCache:
        """Room for ``shape`` (G, T, C): rows of up to T positions. ``like_B`` has the dtype, the device and the number of rows."""
        (G, T, C), device = shape, like_B.device
        slots = whole_steps(T if ring is None else min(T, ring.slots + 1))
        home = torch.device("cpu") if offload else device
        pinned = home != device and device.type == "cuda"
        keys, values = (like_B.new_zeros(len(like_B), G, slots, C, device=home, pin_memory=pinned) for _ in range(2))
        lengths_B = torch.zeros(len(like_B), dtype=torch.int64, device=device)
        rotation = rotary.table(slots, device) if ring is None else rotary.frequencies(device)
        return DraftCache(keys, values, lengths_B, rotation, rotary, ring)

    @property
    def ends_B(self) -> Tensor:
        """The first slot of each row behind its entries."""
        return self.lengths_B if self.ring is None else self.lengths_B.clamp(max=self.ring.slots)

    def reserve(self, length: int) -> DraftCache:
        """With room for rows of ``length`` positions, drafted nodes included. A ring has the room it needs and not much more."""
        at_home = self.at_home()
        if self.ring is None:
            if at_home.slots >= length:
                return self
            keys, values = (grown(store, length) for store in at_home.past)
            rotation = self.rotary.table(keys.shape[2], self.lengths_B.device)
            return replace(at_home, keys_BGSC=keys, values_BGSC=values, rotation=rotation)
        behind = length - int(self.lengths_B.max())   # more than the nodes if entries are to come, as after drafting was off for long
        assert behind >= 0, "a ring has no room for so few positions"
        wanted = whole_steps(min(length, self.ring.slots + behind))
        if wanted <= at_home.slots <= 2 * wanted:
            return self
        keys, values = (sized(store, wanted) for store in at_home.past)
        return replace(at_home, keys_BGSC=keys, values_BGSC=values)

    def select(self, rows_B: Tensor) -> DraftCache:
        at_home = self.at_home()
        keys, values = (select_rows(store, rows_B) for store in at_home.past)
        return replace(at_home, keys_BGSC=keys, values_BGSC=values, lengths_B=self.lengths_B[rows_B])

    def join(self, other: DraftCache) -> DraftCache:
        assert self.ring == other.ring
        longer = max(self, other, key=lambda one: one.slots)
        pairs = zip(self.at_home().past, other.at_home().past, strict=True)
        keys, values = (join_rows(*pair) for pair in pairs)
        lengths_B = torch.cat([self.lengths_B, other.lengths_B])
        return DraftCache(keys, values, lengths_B, longer.rotation, self.rotary, self.ring)

    @property
    def past(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.keys_BGSC, self.values_BGSC

    @property
    def slots(self) -> int:
        """Slots of a row."""
        return self.keys_BGSC.shape[2]

    def rotation_at(self, offsets: Tensor | int) -> Rotation:
        """The rotation at positions counted from each row's end; ``offsets`` is ``[B, T]`` or ``[T]``."""
        return rotary_at(self.rotation, self.lengths_B[:, None] + offsets)

    def extend(self, keys_BGTC: Tensor, values_BGTC: Tensor, offsets_BT: Tensor, counts_B: Tensor) -> DraftCache:
        """With ``counts_B`` more positions per row; the keys and values given are at ``offsets_BT`` behind its end, some padding."""
        ends_B, slots_BT = self.lengths_B + counts_B, self.lengths_B[:, None] + offsets_BT
        if self.ring is not None:
            slots_BT = self.ring.slots_of(slots_BT, ends_B)
        at_home = self.at_home()
        device = at_home.keys_BGSC.device
        for store, new in zip(at_home.past, (keys_BGTC, values_BGTC), strict=True):
            put(store, new.to(device), slots_BT.to(device))
        return replace(at_home, lengths_B=ends_B)

    def on_device(self) -> DraftCache:
        """For a draft: on the device that drafts."""
        device = self.lengths_B.device
        if self.keys_BGSC.device == device:
            return self
        keys, values = (store.to(device, non_blocking=True) for store in self.past)
        return replace(self, keys_BGSC=keys, values_BGSC=values, home=self.past)

    def at_home(self) -> DraftCache:
        """After a draft: where it is kept."""
        return self if self.home is None else replace(self, keys_BGSC=self.home[0], values_BGSC=self.home[1], home=None)
