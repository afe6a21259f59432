"""KV cache of a drafter's layer, over all positions or a bounded number of them, and where drafted nodes are in it.

Keys keep the rotation of their position whatever their slot. Without a `Ring`, position p is in slot p and the cache grows with the
sequence. With one, the first ``sink`` positions keep their slots and the others share ``window`` slots (attention sinks, 2309.17453);
this changes the drafts, never the output. Drafted nodes are stored after a row's entries and overwritten by the next ones. The cache
may be kept in host memory; each draft then uses a copy on the device, which is dropped afterwards.

Nodes are drafted level by level. A node attends to what its parent attends to and to itself, so each level's mask follows from that of the
level above in two operations. On an accelerator a draft's small operations take longer than reading the weights.

Shape suffixes: B batch, G key heads, S slots, T new positions, N nodes, C head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.heads.layers.decoder_layer import Frequencies, Rotary, Rotation, rotary_at
from headstart.heads.layers.ragged_cache import visible_slots
from headstart.heads.layers.rows import RowState, grown, join_rows, octave_up, put, select_rows, sized, whole_steps
from headstart.support.devices import is_accelerator


@dataclass(frozen=True)
class Ring:
    """Bounds a row to its first ``sink`` and last ``window`` positions."""

    window: int
    sink: int

    @property
    def slots(self) -> int:
        """Maximum number of positions kept per row."""
        return self.window + self.sink

    def kept(self, counts_B: Tensor) -> Tensor:
        """Return the indices of those among ``counts_B`` new positions that may be kept: int64 ``[B, slots]``, possibly repeated."""
        first_S = torch.arange(self.sink, device=counts_B.device)
        last_BS = counts_B[:, None] - self.window + torch.arange(self.window, device=counts_B.device)
        return torch.cat([first_S.expand(counts_B.shape[0], -1), last_BS], 1).clamp(min=0)

    def slots_of(self, positions_BT: Tensor, ends_B: Tensor) -> Tensor:
        """Return the slots of positions in rows of length ``ends_B``; expired positions and padding get the first slot after the ring."""
        ends_B1 = ends_B[:, None]
        old_BT = (positions_BT >= self.sink) & (positions_BT < ends_B1 - self.window)
        padding_BT = positions_BT >= ends_B1.clamp(min=self.slots)
        ring_BT = torch.where(positions_BT < self.sink, positions_BT, self.sink + (positions_BT - self.sink) % self.window)
        return torch.where(old_BT | padding_BT, self.slots, ring_BT)


@dataclass(frozen=True)
class DraftCache(RowState):
    """Keys and values of one layer, for rows of different lengths."""

    stored = ("keys_BGSC", "values_BGSC", "rotation")

    keys_BGSC: Tensor
    values_BGSC: Tensor
    lengths_B: Tensor
    """Length of each row, including positions no longer kept."""
    rotation: Rotation | Frequencies
    """Rotary table for all slots, or the frequencies if there is a ring."""
    rotary: Rotary
    ring: Ring | None = None
    home: tuple[Tensor, Tensor] | None = None
    """During a draft of an offloaded cache: the originals in host memory."""

    @staticmethod
    def empty(like_B: Tensor, shape: tuple[int, int, int], rotary: Rotary, ring: Ring | None, offload: bool) -> DraftCache:
        """Allocate a cache of ``shape`` (G, T, C), T the capacity in positions; ``like_B`` gives dtype, device and number of rows."""
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
        """First slot of each row after its entries."""
        return self.lengths_B if self.ring is None else self.lengths_B.clamp(max=self.ring.slots)

    def reserve(self, length: int) -> DraftCache:
        """Return a cache with capacity for ``length`` positions per row, drafted nodes included. A ring also shrinks to what it needs."""
        at_home = self.at_home()
        if self.ring is None:
            keys, values = (grown(store, length) for store in at_home.past)
            if keys is at_home.keys_BGSC:
                return self
            rotation = self.rotary.table(keys.shape[2], self.lengths_B.device)
            return replace(at_home, keys_BGSC=keys, values_BGSC=values, rotation=rotation)
        behind = length - int(self.lengths_B.max())  # includes accepted positions still to be added, after drafting was paused
        assert behind >= 0, "a ring has no room for so few positions"
        if is_accelerator(self.lengths_B.device):  # few sizes, of which none comes back
            wanted = min(octave_up(length), whole_steps(self.ring.slots + octave_up(behind)))
            if wanted <= at_home.slots:
                return self
        else:
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
        longer = max(self, other, key=lambda cache: cache.slots)
        pairs = zip(self.at_home().past, other.at_home().past, strict=True)
        keys, values = (join_rows(*pair) for pair in pairs)
        lengths_B = torch.cat([self.lengths_B, other.lengths_B])
        return DraftCache(keys, values, lengths_B, longer.rotation, self.rotary, self.ring)

    @property
    def past(self) -> tuple[Tensor, Tensor]:
        """The keys and the values."""
        return self.keys_BGSC, self.values_BGSC

    @property
    def slots(self) -> int:
        return self.keys_BGSC.shape[2]

    @property
    def positions_BS(self) -> Tensor:
        """Position of the entry in each slot, int64 ``[B, S]``; larger than any position of the row where there is none."""
        slots_S, lengths_B1 = torch.arange(self.slots, device=self.lengths_B.device), self.lengths_B[:, None]
        if self.ring is None:
            return slots_S.expand(lengths_B1.shape[0], -1)
        last_B1, sink = lengths_B1 - 1, self.ring.sink
        ring_BS = last_B1 - (last_B1 - slots_S) % self.ring.window  # the last position that falls on the slot
        empty_BS = (ring_BS < sink) | (slots_S >= self.ring.slots)
        positions_BS = torch.where(empty_BS, lengths_B1 + slots_S, ring_BS)
        return torch.where(slots_S < sink, slots_S, positions_BS)

    def rotation_at(self, offsets: Tensor | int) -> Rotation:
        """Return the rotation at ``offsets`` (``[B, T]``, ``[T]`` or one) from each row's end."""
        return rotary_at(self.rotation, self.lengths_B[:, None] + offsets)

    def extend(self, keys_BGTC: Tensor, values_BGTC: Tensor, offsets_BT: Tensor, counts_B: Tensor) -> DraftCache:
        """Append ``counts_B`` positions per row; the given keys and values are at ``offsets_BT`` from its end, possibly padding."""
        ends_B, slots_BT = self.lengths_B + counts_B, self.lengths_B[:, None] + offsets_BT
        if self.ring is not None:
            slots_BT = self.ring.slots_of(slots_BT, ends_B)
        at_home = self.at_home()
        device = at_home.keys_BGSC.device
        for store, new in zip(at_home.past, (keys_BGTC, values_BGTC), strict=True):
            put(store, new.to(device), slots_BT.to(device))
        return replace(at_home, lengths_B=ends_B)

    def on_device(self) -> DraftCache:
        """Return the cache on the drafting device, copied there if it is offloaded."""
        device = self.lengths_B.device
        if self.keys_BGSC.device == device:
            return self
        keys, values = (store.to(device, non_blocking=True) for store in self.past)
        return replace(self, keys_BGSC=keys, values_BGSC=values, home=self.past)

    def at_home(self) -> DraftCache:
        """Return the cache where it is kept between drafts, dropping a device copy."""
        return self if self.home is None else replace(self, keys_BGSC=self.home[0], values_BGSC=self.home[1], home=None)


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
    def block(cache: DraftCache, seen_BNN: Tensor, offsets_N: Tensor, window: int | None) -> NodeSlots:
        """Return the slots of nodes drafted at once, which attend to each other where ``seen_BNN`` is True.

        ``offsets_N``: their positions, counted from the row's end. ``window``: a node attends to this many positions up to its own.
        """
        cache = cache.on_device()
        slots_BN = cache.ends_B[:, None] + torch.arange(seen_BNN.shape[1], device=seen_BNN.device)
        seen_BNS = visible_slots(cache.ends_B, seen_BNN, cache.slots)
        if window is not None:  # in slots without an entry, as the nodes' own, positions are beyond the row's
            first_BN1 = (cache.lengths_B[:, None] + offsets_N - window)[..., None]
            seen_BNS = seen_BNS & (cache.positions_BS[:, None] > first_BN1)
        return NodeSlots(slots_BN, additive(seen_BNS, cache.keys_BGSC.dtype))

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
