"""The backbone's forward passes during decoding: prefill, and verification of tree nodes with a tree mask, which is a captured function.

Models that verify chains are read a row at a time, since their states cannot be ragged (`ChainReader`).

Shape suffixes: B batch, T positions, N nodes of this pass, M nodes with slots (the N included), S slots, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, wraps
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.chain_cache import ChainCache, ChainRow, as_steps, mixers_of
from headstart.heads.backbone.features import Features, Images, join_features, stack_rows
from headstart.heads.backbone.recurrent import Added, Branch, States
from headstart.heads.backbone.tree_attention import EXACT_FROM, equal_queries
from headstart.heads.layers.ragged_cache import RaggedCache, Stores, TreeCache, masks_by_kind
from headstart.heads.layers.rows import pad_rows
from headstart.inference.capture.capture import Capturer
from headstart.inference.capture.onednn import OneDNNProducts, available
from headstart.inference.engine.tree import CandidateTree, graph_size
from headstart.support.pytree import map_tensors

EQUAL_ROWS = 4
"""On a CPU a single row is computed as so many equal ones. oneDNN adds up the products of a single row with more than 1,024 inputs in
another order than those of several, so that a plain step would round otherwise than a tree. Two would do; its kernels take less time for
four."""
Layers = list[tuple[Tensor, Tensor] | None]
"""Keys and values ``[B, H, T, D]`` of every layer; None for recurrent layers."""


class Reader:
    """Runs the backbone with the taps of its drafters; its captures are reused by every call."""

    def __init__(self, backbone: Backbone, taps: tuple[int, ...], capturer: Capturer) -> None:
        self.backbone, self.taps = backbone, taps
        self.view: TreeCache | None = None
        self.capturer = capturer
        self.memory = capturer.memory if capturer.fixed else None
        """Where the stores of texts lie; None: each has its own."""
        unless = None if backbone.rope_limit is None else "its rotary frequencies depend on the context length"
        unless = unless if backbone.no_trees is None else "chains are read with transformers' own cache"
        every = partial(self._read, tuple(range(backbone.num_layers + 1)))  # one program for all heads, and for none: the same bits
        self.read = capturer.capture(self._alike(partial(self._read, taps)), "verification", backbone, unless, compilable=every)
        self._prefill = self._alike(self._prefilled)

    def start(self, positions: int) -> None:
        """Start a call; ``positions``: how long a row may become, trees included."""
        self.memory = self.capturer.memory if self.capturer.fixed else None
        self.capturer.memory.positions = max(self.capturer.memory.positions, positions)

    def prompts(self, tokens_BT: Tensor, lengths_B: Tensor, images: Sequence[Images | None] = ()) -> tuple[Features, RaggedCache]:
        """Prefill right-padded rows: returns their features, with padding marked, and their cache. ``images``: by row; empty: none."""
        if (self.backbone.recurrent is not None or any(images)) and len(tokens_BT) > 1:
            return self._apart(tokens_BT, lengths_B, images)
        return self._prompts(tokens_BT, lengths_B, next(filter(None, images), None))

    def _prompts(self, tokens_BT: Tensor, lengths_B: Tensor, own: Images | None) -> tuple[Features, RaggedCache]:
        features, layers, states = self._prefill(tokens_BT, own)
        if own is not None:  # the token of an image may have no embedding, which drafters read
            features = replace(features, tokens_BT=tokens_BT.clamp(max=self.backbone.vocab - 1))
        if len(tokens_BT) > 1:
            place_BT = self._places(tokens_BT)
            features = features.gather(place_BT, place_BT < lengths_B[:, None])
        return features, RaggedCache(layers, lengths_B, states, self.memory, 0 if own is None else own.offset)

    def continued(
        self, layers: Sequence[tuple[Tensor, Tensor]], before: Features, tokens_1T: Tensor, offset: int = 0
    ) -> tuple[Features, RaggedCache]:
        """Prefill the tokens of one row that follow others: returns the features and the cache of all of them.

        ``layers``, ``before``: keys and values ``[1, H, T, D]``, and features, of the tokens before. ``offset``: see `RaggedCache`.
        """
        cache, known = DynamicCache(), layers[0][0].shape[-2]
        for number, layer in enumerate(layers):
            cache.update(*layer, number)
        read = self._alike(lambda: self.backbone.read(tokens_1T, cache, known + offset + self._places(tokens_1T), taps=self.taps))
        whole = join_features([before, read()])
        lengths_1 = torch.tensor([known + tokens_1T.shape[1]], device=tokens_1T.device)
        both = [(layer.keys, layer.values) for layer in cache.layers]
        return replace(whole, document_BT=None), RaggedCache(both, lengths_1, None, self.memory, offset)

    @staticmethod
    def _places(tokens_BT: Tensor) -> Tensor:
        return torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand(tokens_BT.shape)

    def _prefilled(self, tokens_BT: Tensor, images: Images | None) -> tuple[Features, Layers, States | None]:
        """The features of the prompts' tokens, keys and values of every layer, and the states of recurrent ones."""
        recurrent = self.backbone.recurrent
        # Without the model's configuration, sliding-window layers keep all of their keys.
        cache = DynamicCache() if recurrent is None else DynamicCache(config=self.backbone.config)
        features = self.backbone.read(tokens_BT, cache, self._places(tokens_BT), None, self.taps, images)
        numbers = recurrent.numbers if recurrent is not None else ()
        layers = [None if number in numbers else (layer.keys, layer.values) for number, layer in enumerate(cache.layers)]
        return features, layers, States.of(cache, numbers) if numbers else None

    def _apart(self, tokens_BT: Tensor, lengths_B: Tensor, images: Sequence[Images | None]) -> tuple[Features, RaggedCache]:
        """Prefill each row with images by itself, and the others by length, since padding would enter a recurrent layer's state."""
        rows: dict[tuple[int, Images | None], list[int]] = {}
        for row, length in enumerate(lengths_B.tolist()):
            rows.setdefault((length, images[row] if images else None), []).append(row)
        groups = ((tokens_BT[some, :length], lengths_B[some], own) for (length, own), some in rows.items())
        parts, caches = zip(*(self._prompts(*group) for group in groups), strict=True)
        order = [row for some in rows.values() for row in some]
        back = sorted(range(len(order)), key=order.__getitem__)
        for cache in caches[1:]:
            caches[0].join(cache)
        caches[0].select(back)
        return stack_rows(parts).rows(torch.tensor(back, device=tokens_BT.device)), caches[0]

    def tree(self, cache: RaggedCache, tree: CandidateTree) -> tuple[Features, Tensor, Added | None]:
        """Verify a tree: returns the features of every node, the logits ``[B, N, V]`` after it, and what `RaggedCache.keep` needs."""
        nodes = tree.size if cache.memory is None else graph_size(tree.size)
        features, logits_BNV, added = self.nodes(cache, cache.room(nodes), *tree.tensors(cache.lengths_B.device, nodes))
        if nodes > tree.size:
            features, logits_BNV = map_tensors(lambda value_BN: value_BN[:, : tree.size], (features, logits_BNV))
        return features, logits_BNV, added

    def nodes(
        self,
        cache: RaggedCache,
        slots: int,
        tokens_BN: Tensor,
        levels_BM: Tensor,
        ancestors_BNM: Tensor,
        index_BN: Tensor | None = None,
    ) -> tuple[Features, Tensor, Added | None]:
        """The features of N of the M nodes stored after each row, the logits after them, and what they add to recurrent states.

        ``slots``: how many slots of the cache are attended to. ``index_BN``: the indices of the N among the M nodes; None: all. A
        node's position is its row's length plus its level.
        """
        if self.view is None or self.view.groups != cache.groups:
            self.view = TreeCache(cache.groups)
        stores = cache.keys, cache.values
        B, rows = len(tokens_BN), stores[0][0].shape[1]
        offsets = [torch.tensor(cache.offsets, device=tokens_BN.device)] if self.backbone.placeholders else []
        inputs: Any = (tokens_BN, levels_BM, ancestors_BNM), index_BN, (cache.lengths_B, *offsets)
        if rows > B:  # fixed memory
            inputs = map_tensors(lambda value_B: pad_rows(value_B, rows), inputs)
        nodes, index_BN, ends = inputs
        arguments = (stores, cache.states), nodes, index_BN, (*ends, torch.arange(slots, device=tokens_BN.device))
        features, logits_BNV, added = self.read(*arguments)
        if features.taps is not None and len(features.taps) > len(self.taps):
            features = replace(features, taps={tap: features.taps[tap] for tap in self.taps} or None)
        if rows > B:
            features, logits_BNV = map_tensors(lambda value_B: value_B[:B], (features, logits_BNV))
        return features, logits_BNV, added

    def _read(
        self,
        taps: tuple[int, ...],
        held: tuple[Stores, States | None],
        nodes: tuple[Tensor, Tensor, Tensor],
        index_BN: Tensor | None,
        ends: tuple[Tensor, ...],
    ) -> tuple[Features, Tensor, Added | None]:
        """``nodes``, ``index_BN``: see `nodes`. ``ends``: the rows' lengths, their offsets if the model reads images, which no mask counts,
        and the slots attended to, of which only the number counts."""
        assert self.view is not None
        (stores, states), (tokens_BN, levels_BM, ancestors_BNM), (lengths_B, *offsets, slot_S) = held, nodes, ends
        positions_BM = positions_BN = lengths_B[:, None] + levels_BM
        if index_BN is None:
            slots_BN = lengths_B[:, None] + torch.arange(tokens_BN.shape[1], device=lengths_B.device)
        else:
            slots_BN, positions_BN = lengths_B[:, None] + index_BN, positions_BM.gather(1, index_BN)
        masks = masks_by_kind(positions_BN, positions_BM, ancestors_BNM, lengths_B, slot_S.shape[0], self.backbone.windows)
        for offset_B in offsets:
            positions_BN = positions_BN + offset_B[:, None]
        self.view.over(stores, slots_BN, slot_S.shape[0])
        if tokens_BN.shape != (1, 1) or not self.backbone.exact:
            return self._pass(taps, Branch(states, ancestors_BNM, levels_BM), tokens_BN, positions_BN, masks)
        rows, itself = (1, EQUAL_ROWS), torch.eye(EQUAL_ROWS, dtype=torch.bool)[None]
        with equal_queries():
            masks = {kind: mask_BNS.expand(*rows, -1) for kind, mask_BNS in masks.items()}
            level_11 = levels_BM if index_BN is None else levels_BM.gather(1, index_BN)  # of beams, many nodes have slots
            branch = Branch(states, itself, level_11.expand(rows))
            self.view.over(stores, slots_BN.expand(rows), slot_S.shape[0])
            found = self._pass(taps, branch, tokens_BN.expand(rows), positions_BN.expand(rows), masks)
        features, logits_BNV, added = found
        return map_tensors(lambda states: states[:, :1], features), logits_BNV[:, :1], added

    def _pass(
        self, taps: tuple[int, ...], branch: Branch, tokens_BN: Tensor, positions_BN: Tensor, masks: dict[str, Tensor]
    ) -> tuple[Features, Tensor, Added | None]:
        recurrent = self.backbone.recurrent
        with recurrent.along(branch) if recurrent is not None else nullcontext():
            features = self.backbone.read(tokens_BN, self.view, positions_BN, masks, taps)
        return features, self.backbone.readout(features.hidden_BTD), branch.added() if recurrent is not None else None

    def _alike(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with products in fp32 on a CPU as its captures have them, so that they give the same bits."""
        if not self.backbone.exact or self.backbone.dim < EXACT_FROM or not available(torch.float32):
            return function

        @wraps(function, assigned=())
        def run(*inputs: Any) -> Any:
            with OneDNNProducts():
                return function(*inputs)

        return run


def reader_of(backbone: Backbone, taps: tuple[int, ...], capturer: Capturer) -> Reader:
    """The reader for a backbone: of trees, or of chains where it cannot read trees."""
    return (Reader if backbone.no_trees is None else ChainReader)(backbone, taps, capturer)


class ChainReader(Reader):
    """Reads prompts and chains with transformers' own cache; nothing is captured."""

    def __init__(self, backbone: Backbone, taps: tuple[int, ...], capturer: Capturer) -> None:
        super().__init__(backbone, taps, capturer)
        self.mixers = mixers_of(backbone.model)

    def prompts(self, tokens_BT: Tensor, lengths_B: Tensor, images: Sequence[Images | None] = ()) -> tuple[Features, ChainCache]:  # type: ignore[override]
        parts, rows = [], []
        for tokens_T, length, own in zip_longest(tokens_BT, lengths_B.tolist(), images):
            cache = DynamicCache(config=self.backbone.config)
            parts.append(self._read_after(0, tokens_T[None, :length], cache, own))
            rows.append(ChainRow(cache, length, 0 if own is None else own.offset))
        return stack_rows(parts), ChainCache(rows, tokens_BT.device)

    def tree(self, cache: ChainCache, tree: CandidateTree) -> tuple[Features, Tensor, None]:  # type: ignore[override]
        features = stack_rows([self._read_chain(row, chain) for row, chain in zip(cache.rows, tree.tokens, strict=True)])
        return features, self.backbone.readout(features.hidden_BTD), None

    def _read_chain(self, row: ChainRow, chain: list[int]) -> Features:
        def run(tokens: list[int], start: int, cache: DynamicCache) -> Features:
            with as_steps(self.mixers, len(tokens)):
                return self._read_after(start + row.offset, torch.tensor([tokens], device=self.backbone.device), cache)

        return map_tensors(lambda value_1T: value_1T[:, -len(chain) :], row.read(chain, run))

    def _read_after(self, start: int, tokens_1T: Tensor, cache: DynamicCache, images: Images | None = None) -> Features:
        return self.backbone.read(tokens_1T, cache, start + self._places(tokens_1T), None, self.taps, images)
