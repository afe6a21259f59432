"""A decoder layer with its own KV cache, optionally with a sliding window, bounded or offloaded.

Accepted positions extend the cache; drafted nodes are stored after them and overwritten by the next accepted ones. A drafter has
one `CachedLayer` per layer, or a `CachedStack` of consecutive ones, and keeps their `DraftCache`s in its state.

Shape suffixes: B batch, T new positions, N nodes, S slots, D width, X width of the attention's input.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headstart.heads.layers.causal_attention import Blocks
from headstart.heads.layers.decoder_layer import DecoderLayer, Rotary
from headstart.heads.layers.draft_cache import DraftCache, NodeSlots, Ring, past_mask
from headstart.heads.layers.rows import put


class CachedLayer:
    """A layer used with a KV cache. Not a module: the drafter registers the layer under the name that serving engines expect."""

    def __init__(self, layer: DecoderLayer, rotary: Rotary, window: int | None = None) -> None:
        """``window``: the layer is trained to attend to this many positions up to its own (None: all), and no more are kept."""
        self.layer, self.rotary, self.window = layer, rotary, window
        self.limit(None)

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        """See `Drafter.limit`; applies to caches made later. A layer with a window of its own has no sinks, and keeps no more than that."""
        if self.window is not None:
            window, sink = min(window or self.window, self.window), 0
        self.ring, self.offload = None if window is None else Ring(window, sink), offload

    def empty(self, tokens_BT: Tensor) -> DraftCache:
        """Return an empty cache with capacity for ``tokens_BT``."""
        attention = self.layer.self_attn
        like_B = tokens_BT.new_empty(len(tokens_BT), dtype=self.layer.dtype)
        shape = (attention.num_kv, tokens_BT.shape[1], attention.head_dim)
        return DraftCache.empty(like_B, shape, self.rotary, self.ring, self.offload)

    def kept_offsets(self, cache: DraftCache, positions: int, counts_B: Tensor) -> Tensor:
        """Return the offsets ``[B, T]`` of the new positions to compute keys for: all, or those that the ring keeps."""
        if cache.ring is None or cache.ring.slots >= positions:
            return torch.arange(positions, device=counts_B.device).expand(counts_B.shape[0], -1)
        return cache.ring.kept(counts_B)

    def extend(self, cache: DraftCache, x_BTX: Tensor, offsets_BT: Tensor, counts_B: Tensor) -> DraftCache:
        """Extend the cache by ``counts_B`` positions per row; ``x_BTX`` (see `DecoderLayer.inputs`) are those at ``offsets_BT``."""
        return cache.extend(*self.layer.keys_values(x_BTX, cache.rotation_at(offsets_BT)), offsets_BT, counts_B)

    def attend_new(self, cache: DraftCache, x_BTX: Tensor, state_BTD: Tensor, offsets_BT: Tensor, counts_B: Tensor) -> Tensor:
        """Return the layer's output ``[B, T, D]`` at the positions just added by `extend`, with the same arguments: the next layer's input.

        A position attends to the positions up to its own that the cache keeps. Outputs of padding are arbitrary, but finite.
        """
        cache = cache.on_device()
        offsets_BT = offsets_BT - counts_B[:, None]
        mask_BTS = cache.positions_BS[:, None] <= (cache.lengths_B[:, None] + offsets_BT)[..., None]
        mask_BTS = mask_BTS | (torch.arange(cache.slots, device=mask_BTS.device) == 0)  # a row without positions would have no key
        query = self.layer.self_attn.queries(x_BTX, cache.rotation_at(offsets_BT))
        return self.layer.attend(query, state_BTD, x_BTX, cache.past, mask_BTS)

    def extend_and_attend(
        self, cache: DraftCache, x_BTX: Tensor, state_BTD: Tensor, offsets_BT: Tensor, counts_B: Tensor
    ) -> tuple[Tensor, DraftCache]:
        """Return the layer's output ``[B, T, D]`` at the new positions, which is the next layer's input, and the extended cache.

        In a layer with a window of its own, a position attends to that many positions up to its own, in whatever pieces they come.
        """
        if self.window is None:
            cache = self.extend(cache, x_BTX, offsets_BT, counts_B)
            return self.attend_new(cache, x_BTX, state_BTD, offsets_BT, counts_B), cache
        cache = cache.on_device()
        lengths_B1 = cache.lengths_B[:, None]
        query, *new = self.layer.self_attn.project(x_BTX, cache.rotation_at(offsets_BT))
        # The extended cache lacks what the first positions attend to.
        keys, values = (torch.cat(pair, 2) for pair in zip(cache.past, new, strict=True))
        position_BT = lengths_B1 + offsets_BT
        repeated_BT = torch.cat([torch.zeros_like(offsets_BT[:, :1]), offsets_BT.diff(dim=1) == 0], 1).bool()
        there_BX = torch.cat([cache.positions_BS < lengths_B1, ~repeated_BT], 1)
        distance_BTX = position_BT[..., None] - torch.cat([cache.positions_BS, position_BT], 1)[:, None]
        mask_BTX = there_BX[:, None] & (distance_BTX >= 0) & (distance_BTX < self.window)
        output_BTD = self.layer.attend(query, state_BTD, x_BTX, (keys, values), mask_BTX)
        return output_BTD, cache.extend(new[0], new[1], offsets_BT, counts_B)

    def attend_last(self, cache: DraftCache, x_B1X: Tensor, state_B1D: Tensor) -> Tensor:
        """Return the layer's output ``[B, 1, D]`` at each row's last position, which is in the cache already."""
        cache = cache.on_device()
        query = self.layer.self_attn.queries(x_B1X, cache.rotation_at(-1))
        return self.layer.attend(query, state_B1D, x_B1X, cache.past, past_mask(cache)[:, None])

    def nodes_below(self, cache: DraftCache, above: NodeSlots | None, parents_BN: Tensor, offset: int) -> NodeSlots:
        """Return the slots of the next level's nodes and what they attend to (`NodeSlots.below`)."""
        return NodeSlots.below(cache, above, parents_BN, offset, self.window)

    def attend_nodes(
        self, cache: DraftCache, x_BNX: Tensor, state_BND: Tensor, nodes: NodeSlots, offsets: Tensor | int
    ) -> tuple[Tensor, DraftCache]:
        """Return the layer's output ``[B, N, D]`` at drafted nodes, and the cache with these nodes.

        ``offsets`` (``[N]``, or one for all): the nodes' positions, counted from the row's end.
        """
        cache = cache.on_device()
        query, *new = self.layer.self_attn.project(x_BNX, cache.rotation_at(offsets))
        for store, entries in zip(cache.past, new, strict=True):
            put(store, entries, nodes.slots_BN)
        return self.layer.attend(query, state_BND, x_BNX, cache.past, nodes.mask_BNS), cache


Caches = tuple[DraftCache, ...]
"""One per layer."""
Pass = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of one training pass, per layer."""


class CachedStack:
    """Consecutive layers as one: the first reads the streams of a head, the others its output. Not a module, as `CachedLayer`."""

    def __init__(self, layers: Sequence[DecoderLayer], rotary: Rotary, window: int | None = None) -> None:
        """``window``: every layer attends to this many positions up to its own (None: all), in training and decoding."""
        self.layers = [CachedLayer(layer, rotary, window) for layer in layers]
        self.rotary, self.window = rotary, window

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        """See `Drafter.limit`."""
        for layer in self.layers:
            layer.limit(window, sink, offload)

    def forward_train(self, streams: Sequence[Tensor], passes: Sequence[Pass], blocks: Blocks) -> tuple[Tensor, Pass]:
        """Compute pass ``len(passes)`` at all positions (`DecoderLayer.forward_train`); returns the last layer's output and this pass."""
        new = []
        for i, cached in enumerate(self.layers):
            output_BTD, keys_values = cached.layer.forward_train(streams, [each[i] for each in passes], self.rotary, blocks)
            new.append(keys_values)
            streams = (output_BTD,)
        return output_BTD, tuple(new)

    def empty(self, tokens_BT: Tensor) -> Caches:
        """Return empty caches with capacity for ``tokens_BT``."""
        return tuple(layer.empty(tokens_BT) for layer in self.layers)

    def kept_offsets(self, caches: Caches, positions: int, counts_B: Tensor) -> Tensor:
        """Return the offsets ``[B, T]`` of the new positions to compute, see `CachedLayer.kept_offsets`.

        With a window these are a window's more per layer, since what the last one keeps depends on as many positions of the one before.
        """
        first = caches[0]
        if self.window is not None and len(self.layers) > 1:
            first = replace(first, ring=Ring(len(self.layers) * self.window, 0))
        return self.layers[0].kept_offsets(first, positions, counts_B)

    def extend(self, caches: Caches, streams: Sequence[Tensor], offsets_BT: Tensor, counts_B: Tensor) -> Caches:
        """Extend the caches by ``counts_B`` positions per row; ``streams`` are the first layer's at ``offsets_BT``."""
        extended = []
        for cached, cache in zip(self.layers[:-1], caches[:-1], strict=True):
            inputs = cached.layer.inputs(*streams), streams[-1], offsets_BT, counts_B
            output_BTD, cache = cached.extend_and_attend(cache, *inputs)
            extended.append(cache)
            streams = (output_BTD,)
        last = self.layers[-1]
        return (*extended, last.extend(caches[-1], last.layer.inputs(*streams), offsets_BT, counts_B))

    def nodes_below(self, caches: Caches, above: NodeSlots | None, parents_BN: Tensor, offset: int) -> NodeSlots:
        """Return the slots of the next level's nodes (`NodeSlots.below`), which are the same in all layers."""
        return self.layers[0].nodes_below(caches[0], above, parents_BN, offset)

    def attend_nodes(self, caches: Caches, streams: Sequence[Tensor], nodes: NodeSlots, offsets: Tensor | int) -> tuple[Tensor, Caches]:
        """Return the output ``[B, N, D]`` at drafted nodes, and the caches with them (`CachedLayer.attend_nodes`)."""
        extended = []
        for cached, cache in zip(self.layers, caches, strict=True):
            output_BND, cache = cached.attend_nodes(cache, cached.layer.inputs(*streams), streams[-1], nodes, offsets)
            extended.append(cache)
            streams = (output_BND,)
        return output_BND, tuple(extended)
