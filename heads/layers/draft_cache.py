"""What an EAGLE-type head keeps of its rows while it drafts: keys and values of their pairs, all of them or a bounded number.

Pair p of a row stands at position p, whatever slot it lies in. Without a `Ring` that is slot p, and room grows with the text. With
one, the first pairs have slots of their own and the others share as many slots as the window is long (attention sinks, 2309.17453);
which pairs a head looks at changes what it proposals, never what is written. Drafted nodes lie behind a row's pairs, and the next pairs
overwrite them. The store may be at home in host memory: then a draft works on a copy, which is dropped after it.

Shape suffixes: B batch, G heads of keys, S slots, T new pairs, C head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.heads.layers.decoder_layer import Frequencies, Rotary, Rotation, rotary_at
from headstart.heads.layers.ragged import grown, put, sized, whole_steps


@dataclass(frozen=True)
class Ring:
    """A row keeps its first ``sink`` pairs and its last ``window``."""

    window: int
    sink: int

    @property
    def slots(self) -> int:
        """Pairs a row keeps at most."""
        return self.window + self.sink

    def wanted(self, counts_B: Tensor) -> Tensor:
        """Of ``counts_B`` new pairs those that may be kept, by their places among the new ones: int64 ``[B, slots]``, some twice."""
        first_S = torch.arange(self.sink, device=counts_B.device)
        last_BS = counts_B[:, None] - self.window + torch.arange(self.window, device=counts_B.device)
        return torch.cat([first_S.expand(len(counts_B), -1), last_BS], 1).clamp(min=0)

    def slots_of(self, places_BT: Tensor, ends_B: Tensor) -> Tensor:
        """Where pairs go once rows have ``ends_B`` of them. What is too old and what is padding go where drafted nodes will lie."""
        ends_B1 = ends_B[:, None]
        outside_BT = ((places_BT >= self.sink) & (places_BT < ends_B1 - self.window)) | (places_BT >= ends_B1.clamp(min=self.slots))
        ring_BT = torch.where(places_BT < self.sink, places_BT, self.sink + (places_BT - self.sink) % self.window)
        return torch.where(outside_BT, self.slots, ring_BT)


@dataclass(frozen=True)
class DraftCache:
    """Keys and values of rows of different lengths."""

    keys_BGSC: Tensor
    values_BGSC: Tensor
    lengths_B: Tensor
    """Pairs of each row, those included that are kept no longer."""
    turns: Rotation | Frequencies
    """Of the positions."""
    ring: Ring | None = None
    home: tuple[Tensor, Tensor] | None = None
    """During a draft: the keys and values that the others are a copy of."""

    @staticmethod
    def empty(like_B: Tensor, shape: tuple[int, int, int], rotary: Rotary, ring: Ring | None, offload: bool) -> DraftCache:
        """For ``shape`` (G, T, C): rows with up to T pairs. ``like_B`` has the dtype, the device and the number of rows."""
        (G, T, C), device = shape, like_B.device
        slots = whole_steps(T if ring is None else min(T, ring.slots + 1))
        home = torch.device("cpu") if offload else device
        pinned = home != device and device.type == "cuda"
        keys, values = (like_B.new_zeros(len(like_B), G, slots, C, device=home, pin_memory=pinned) for _ in range(2))
        lengths_B = torch.zeros(len(like_B), dtype=torch.int64, device=device)
        return DraftCache(keys, values, lengths_B, rotary.table(slots, device) if ring is None else rotary.frequencies(device), ring)

    @property
    def ends_B(self) -> Tensor:
        """The first slot of each row that no pair of it lies in."""
        return self.lengths_B if self.ring is None else self.lengths_B.clamp(max=self.ring.slots)

    def reserve(self, length: int, rotary: Rotary) -> DraftCache:
        """With room for rows of ``length`` positions, drafted nodes included. A ring has the room it needs and not much more."""
        kept = self.kept()
        if self.ring is None:
            if kept.slots >= length:
                return self
            keys, values = (grown(x, length) for x in kept.past)
            return replace(kept, keys_BGSC=keys, values_BGSC=values, turns=rotary.table(keys.shape[2], self.lengths_B.device))
        behind = length - int(self.lengths_B.max())   # more than the nodes if pairs are to come, as after a long rest
        wanted = whole_steps(min(length, self.ring.slots + behind))
        return self if wanted <= kept.slots <= 2 * wanted else kept._sized(wanted)

    def select(self, rows_B: Tensor) -> DraftCache:
        """Those rows, in that order."""
        kept = self.kept()
        keys, values = (_pinned(x, x[rows_B.to(x.device)]) for x in kept.past)
        return replace(kept, keys_BGSC=keys, values_BGSC=values, lengths_B=self.lengths_B[rows_B])

    def join(self, other: DraftCache) -> DraftCache:
        """The rows of both, the other's behind."""
        assert self.ring == other.ring
        longer = max(self, other, key=lambda one: one.slots)
        one, two = (store.kept()._sized(longer.slots) for store in (self, other))
        keys, values = (_pinned(mine, torch.cat([mine, theirs])) for mine, theirs in zip(one.past, two.past, strict=True))
        return DraftCache(keys, values, torch.cat([self.lengths_B, other.lengths_B]), longer.turns, self.ring)

    @property
    def past(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.keys_BGSC, self.values_BGSC

    @property
    def slots(self) -> int:
        """How many slots a row has."""
        return self.keys_BGSC.shape[2]

    def positions(self, places_BT: Tensor | int) -> Rotation:
        """The rotation at places counted from each row's end."""
        return rotary_at(self.turns, self.lengths_B[:, None] + places_BT)

    def extend(self, keys_BGTC: Tensor, values_BGTC: Tensor, places_BT: Tensor, counts_B: Tensor) -> DraftCache:
        """With ``counts_B`` more pairs a row; given are those at these places behind its end, of which some may be padding."""
        ends_B, slots_BT = self.lengths_B + counts_B, self.lengths_B[:, None] + places_BT
        if self.ring is not None:
            slots_BT = self.ring.slots_of(slots_BT, ends_B)
        kept = self.kept()
        home = kept.keys_BGSC.device
        for past, new in zip(kept.past, (keys_BGTC, values_BGTC), strict=True):
            put(past, new.to(home), slots_BT.to(home))
        return replace(kept, lengths_B=ends_B)

    def at_hand(self) -> DraftCache:
        """For a draft: on the device that drafts."""
        device = self.lengths_B.device
        if self.keys_BGSC.device == device:
            return self
        keys, values = (x.to(device, non_blocking=True) for x in self.past)
        return replace(self, keys_BGSC=keys, values_BGSC=values, home=self.past)

    def kept(self) -> DraftCache:
        """After a draft: where it is at home."""
        return self if self.home is None else replace(self, keys_BGSC=self.home[0], values_BGSC=self.home[1], home=None)

    def _sized(self, slots: int) -> DraftCache:
        return replace(self, keys_BGSC=sized(self.keys_BGSC, slots), values_BGSC=sized(self.values_BGSC, slots))


def _pinned(like: Tensor, made: Tensor) -> Tensor:
    """In pinned memory if the other is, so that it moves to an accelerator at full speed."""
    return made.pin_memory() if like.is_pinned() else made
