"""Consecutive decoder layers, each with its own KV cache, as one: the first reads the streams of a head, the others its output.

Shape suffixes: B batch, T positions, N nodes, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.heads.layers.cached_layer import CachedLayer
from headstart.heads.layers.causal_attention import Blocks
from headstart.heads.layers.decoder_layer import DecoderLayer, Rotary
from headstart.heads.layers.draft_cache import DraftCache, Ring
from headstart.heads.layers.node_slots import NodeSlots

Caches = tuple[DraftCache, ...]
"""One per layer."""
Pass = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of one training pass, per layer."""


class CachedStack:
    """Layers used with KV caches. Not a module: the drafter registers the layers under the names that serving engines expect."""

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
        reach = Ring(len(self.layers) * self.window, 0) if self.window is not None else None
        if reach is None or len(self.layers) == 1:
            return self.layers[0].kept_offsets(caches[0], positions, counts_B)
        if reach.slots >= positions:
            return torch.arange(positions, device=counts_B.device).expand(counts_B.shape[0], -1)
        return reach.kept(counts_B)

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
