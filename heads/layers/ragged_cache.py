"""The backbone's KV cache during decoding: ragged rows, tree nodes stored after the end of each row, accepted paths moved into place.

All layers of one shape are stored in one tensor, so that moving a path is one copy. Every layer keeps all keys, also those outside a
sliding window, so a slot is a position. `TreeCache` presents the stores to the model as a `transformers.Cache`. Recurrent layers have
states instead (heads/backbone/recurrent.py), which a pass leaves unchanged: `keep` advances them to the last accepted node.

Masks follow from the ancestor relations in a tree. Row b has its past in slots ``0 .. length_b - 1`` and node m of its tree in slot
``length_b + m``. A node attends to its row's past, its ancestors and itself. The tensor functions copy nothing to the host and branch on
shapes only, so that they can be captured.

Shape suffixes: L layers, B batch, H heads, N tree nodes (the last of the M), M nodes, P path, S slots, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from headstart.heads.backbone.recurrent import Added, States
from headstart.heads.layers.rows import (
    FixedMemory,
    grown,
    join_rows,
    move,
    octave_up,
    pad_rows,
    padded_rows,
    put,
    replace_rows,
    rounded_up,
    select_rows,
    sized,
)  # fmt: skip
from headstart.support.devices import is_accelerator
from headstart.support.pytree import list_tensors, map_tensors


def ancestors_from_parents(parents: Sequence[Sequence[int]]) -> np.ndarray:
    """Return ``[B, N, N]``, True where the second node is an ancestor of the first or the first itself.

    ``parents[b][n]`` is the parent of node n and precedes it; node 0 is the root and its own parent. Shorter rows are padded with
    nodes whose only ancestor is the root.
    """
    B, N = len(parents), max(map(len, parents))
    ancestors = np.zeros((B, N, N), dtype=np.bool_)
    ancestors[:, np.arange(N), np.arange(N)] = True
    ancestors[:, :, 0] = True
    for b, row in enumerate(parents):
        for node in range(1, len(row)):
            if row[node]:
                ancestors[b, node] |= ancestors[b, row[node]]
    return ancestors


def extend_ancestors(ancestors_BNM: Tensor | None, parents_BN: Tensor) -> Tensor:
    """Return the ancestors of the next level's nodes among all nodes so far, themselves included: ``[B, N', M + N']``.

    ``ancestors_BNM`` are those of the previous level (None: this is the first); ``parents_BN`` are the parents' indices in that level.
    """
    B, N = parents_BN.shape
    itself_BNN = torch.eye(N, dtype=torch.bool, device=parents_BN.device).expand(B, N, N)
    if ancestors_BNM is None:
        return itself_BNN
    above_BNM = ancestors_BNM.gather(1, parents_BN[..., None].expand(-1, -1, ancestors_BNM.shape[-1]))
    return torch.cat([above_BNM, itself_BNN], -1)


def visible_slots(lengths_B: Tensor, ancestors_BNM: Tensor, slots: int) -> Tensor:
    """Return the mask ``[B, N, S]``, True where a node attends: its row's past, its ancestors and itself."""
    N, M = ancestors_BNM.shape[1:]
    seen_BNX = F.pad(F.pad(ancestors_BNM, (1, 0), value=True), (0, 1), value=False)  # X: the past, the nodes, what lies behind them
    index_BS = (torch.arange(1, slots + 1, device=lengths_B.device) - lengths_B[:, None]).clamp(0, M + 1)
    return seen_BNX.gather(2, index_BS[:, None].expand(-1, N, -1))


def masks_by_kind(
    positions_BN: Tensor, positions_BM: Tensor, ancestors_BNM: Tensor, lengths_B: Tensor, slots: int, windows: dict[str, int | None]
) -> dict[str, Tensor]:
    """Return the mask ``[B, N, S]`` of each kind of attention layer, True where a node at ``positions_BN`` attends.

    ``positions_BM`` are the positions of all nodes. Windows count positions, and siblings share a position.
    """
    allowed_BNS = visible_slots(lengths_B, ancestors_BNM, slots)
    if not any(windows.values()):
        return dict.fromkeys(windows, allowed_BNS)
    slots_S = torch.arange(slots, device=lengths_B.device)
    node_BS = (slots_S - lengths_B[:, None]).clamp(min=0).clamp(max=ancestors_BNM.shape[-1] - 1)
    key_BS = torch.where(slots_S < lengths_B[:, None], slots_S, positions_BM.gather(1, node_BS))
    distance_BNS = positions_BN[..., None] - key_BS[:, None]
    return {kind: allowed_BNS if window is None else allowed_BNS & (distance_BNS < window) for kind, window in windows.items()}


Stores = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Keys and values ``[L, B, H, S, D]`` of each group of layers of one shape."""


class RaggedCache:
    """The cache of all rows. The tokens of row b are in slots 0 to ``lengths_B[b] - 1``; the next pass overwrites the slots after them."""

    def __init__(
        self,
        layers: Sequence[tuple[Tensor, Tensor] | None],
        lengths_B: Tensor,
        states: States | None = None,
        memory: FixedMemory | None = None,
        offset: int = 0,
    ) -> None:
        """``layers``: keys and values ``[B, H, T, D]`` of right-padded prompts; None for recurrent layers, which are in ``states``.

        ``memory``: where the stores lie from the first pass on, with padded numbers of rows and slots; None: they are of this cache alone.
        """
        there = {number: layer for number, layer in enumerate(layers) if layer is not None}
        self.groups = _groups(there)
        self.keys = tuple(torch.stack([there[i][0] for i in group]) for group in self.groups)
        self.values = tuple(torch.stack([there[i][1] for i in group]) for group in self.groups)
        self.states, self.memory = states, memory
        self.lengths_B = lengths_B
        self._lengths: list[int] = lengths_B.tolist()  # on the host too: reading from the device would wait for it
        self.offsets = [offset] * len(self._lengths)
        """The position of each row's next token, less its length: another than 0 after images that take fewer positions than tokens."""

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return max(self._lengths)

    def room(self, nodes: int) -> int:
        """Have room for ``nodes`` nodes after the longest row; returns how many slots a pass over them attends to (`rounded_up`)."""
        if self.memory is not None:
            self._place(self.memory, self.longest + nodes)
            return self.keys[0].shape[-2]
        slots = rounded_up(self.longest + nodes, self.lengths_B.device)
        # On a CPU never exactly full, so that compiled passes meet one kind of strides.
        room = slots if is_accelerator(self.lengths_B.device) else slots + 1
        self.keys = tuple(grown(store, room) for store in self.keys)
        self.values = tuple(grown(store, room) for store in self.values)
        return slots

    def stores(self, nodes: int) -> Stores:
        """Keys and values of the slots that a pass over ``nodes`` nodes after the longest row attends to."""
        slots = self.room(nodes)
        return tuple(store[..., :slots, :] for store in self.keys), tuple(store[..., :slots, :] for store in self.values)

    def _place(self, memory: FixedMemory, slots: int) -> None:
        """Have everything in the memory, with at least so many slots, never fewer than before. Rows are padded by copies of the last."""
        rows, groups = padded_rows(len(self._lengths)), len(self.groups)
        slots = octave_up(max([slots, *(store.shape[-2] for store in self.keys)]))
        placed = memory.place("cache", [pad_rows(sized(store, slots), rows, -4) for store in self.keys + self.values])
        self.keys, self.values = tuple(placed[:groups]), tuple(placed[groups:])
        states = iter(memory.place("states", [pad_rows(state, rows, 1) for state in list_tensors(self.states)], slots=False))
        self.states = map_tensors(lambda _: next(states), self.states)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, H, S, D]`` of one layer."""
        group, place = next((g, group.index(number)) for g, group in enumerate(self.groups) if number in group)
        keys, values = (self._rows(side[group])[place] for side in (self.keys, self.values))
        return keys, values

    def _rows(self, store: Tensor, dim: int = 1) -> Tensor:
        """The store without the rows that pad it."""
        return store.narrow(dim, 0, len(self._lengths))

    def keep(self, paths: list[list[int]], added: Added | None = None, lengths: list[int] | None = None) -> None:
        """Append the nodes ``paths[b]`` to row b: move their keys and values to its end. ``added``: see `Reader.tree`.

        ``lengths`` of the rows from now on: nodes beyond them stay nodes; None: all are the row's.
        """
        counts = list(map(len, paths))
        if any(path != list(range(len(path))) for path in paths):
            longest = max(counts)
            device = self.lengths_B.device
            path_BP = torch.tensor([path + list(range(len(path), longest)) for path in paths], device=device)
            source_BP = self.lengths_B[:, None] + path_BP
            target_BP = self.lengths_B[:, None] + torch.arange(longest, device=device)
            for store in (*self.keys, *self.values):
                move(store, source_BP, target_BP)
        if self.states is not None:
            assert added is not None
            last_B = torch.tensor([path[-1] for path in paths], device=self.lengths_B.device)
            self.states.overwrite(self.states.behind(added, pad_rows(last_B, len(added.seen_BNM))))
        if lengths is not None:
            counts = [new - length for new, length in zip(lengths, self._lengths, strict=True)]
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        self.lengths_B = self.lengths_B + (counts[0] if len({*counts}) == 1 else torch.tensor(counts, device=self.lengths_B.device))

    def join(self, other: RaggedCache) -> None:
        """Append the rows of another cache of the same layers."""
        self.keys, self.values = (
            tuple(join_rows(self._rows(mine), other._rows(theirs)) for mine, theirs in zip(*sides, strict=True))
            for sides in ((self.keys, other.keys), (self.values, other.values))
        )
        states = iter(list_tensors(other.states))
        self.states = map_tensors(lambda mine: torch.cat([self._rows(mine), other._rows(next(states))], 1), self.states)
        self.lengths_B = torch.cat([self.lengths_B, other.lengths_B])
        self._lengths, self.offsets = self._lengths + other._lengths, self.offsets + other.offsets

    def replace(self, rows: list[int], other: RaggedCache) -> None:
        """Put the rows of another cache of the same layers in the places of ``rows``, which is less to move than `select` and `join`."""
        rows_B = torch.tensor(rows, device=self.lengths_B.device)
        self.keys = tuple(replace_rows(mine, rows, new) for mine, new in zip(self.keys, other.keys, strict=True))
        self.values = tuple(replace_rows(mine, rows, new) for mine, new in zip(self.values, other.values, strict=True))
        theirs = iter(list_tensors(other.states))  # a new cache is not padded yet
        self.states = map_tensors(lambda mine: mine.index_copy(1, rows_B, next(theirs)), self.states)
        self.lengths_B = self.lengths_B.index_copy(0, rows_B, other.lengths_B)
        for row, length, offset in zip(rows, other._lengths, other.offsets, strict=True):
            self._lengths[row], self.offsets[row] = length, offset

    def select(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        rows_B = torch.tensor(rows, dtype=torch.int64, device=self.lengths_B.device)
        self.keys = tuple(select_rows(store, rows_B) for store in self.keys)
        self.values = tuple(select_rows(store, rows_B) for store in self.values)
        self.states = map_tensors(lambda state: state[:, rows_B], self.states)
        self.lengths_B = self.lengths_B[rows_B]
        self._lengths, self.offsets = [self._lengths[row] for row in rows], [self.offsets[row] for row in rows]


def _groups(layers: dict[int, tuple[Tensor, Tensor]]) -> list[list[int]]:
    """Group layer numbers by the shape, dtype and device of their keys and values."""
    alike: dict[Any, list[int]] = {}
    for i, (keys, values) in layers.items():
        alike.setdefault((keys.shape, values.shape, keys.dtype, keys.device), []).append(i)
    return list(alike.values())


class TreeLayer(CacheLayerMixin):
    """One layer of a `TreeCache`."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: TreeCache, group: int, place: int) -> None:
        super().__init__()
        self.cache, self.group, self.place = cache, group, place
        self.is_initialized = True
        self.keys = self.values = torch.empty(0)  # Mllama asks whether there are any

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        stores, index_BN = [side[self.group] for side in self.cache.stores], self.cache.index_BN
        if key_states.requires_grad:  # gradients need what the stores held before
            keys, values = (store[self.place].clone() for store in stores)
            self.cache.copies[self.group, self.place] = keys, values
            put(keys, key_states, index_BN)
            put(values, value_states, index_BN)
            return keys, values
        keys_BHSD, values_BHSD = (store[self.place] for store in stores)
        put(keys_BHSD, key_states, index_BN)
        put(values_BHSD, value_states, index_BN)
        if (slots := self.cache.slots) is not None:
            keys_BHSD, values_BHSD = keys_BHSD[..., :slots, :], values_BHSD[..., :slots, :]
        return keys_BHSD, values_BHSD

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.slots or self.cache.stores[0][self.group].shape[-2], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """The stores as a `transformers.Cache` for a pass over a tree: new keys go to slots ``index_BN``, all slots are returned."""

    def __init__(self, groups: list[list[int]]) -> None:
        self.groups = groups
        where = {number: (g, place) for g, group in enumerate(groups) for place, number in enumerate(group)}
        # Recurrent layers never use this cache; a DynamicLayer keeps the layer numbers in place.
        super().__init__(layers=[TreeLayer(self, *where[i]) if i in where else DynamicLayer() for i in range(max(where) + 1)])
        self.stores: Stores
        self.index_BN: Tensor
        self.slots: int | None = None
        """The slots that are attended to, from the first on; None: all."""
        self.copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Keys and values of layers whose pass was differentiable, by group and place in it."""

    def over(self, stores: Stores, index_BN: Tensor, slots: int | None = None) -> TreeCache:
        """Set the stores of the next pass, the slots it writes to and how many it attends to (None: all); returns itself."""
        self.stores, self.index_BN, self.slots, self.copies = stores, index_BN, slots, {}
        return self

    def written(self) -> Stores:
        """Return the stores after the pass: the same, written in place, or new ones if it was differentiable."""
        if not self.copies:
            return self.stores
        groups = [[self.copies[g, place] for place in range(len(group))] for g, group in enumerate(self.groups)]
        keys, values = (tuple(torch.stack([layer[side] for layer in group]) for group in groups) for side in (0, 1))
        self.copies = {}
        return keys, values
