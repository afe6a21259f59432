"""Forward passes of models that verify chains: a row at a time, since their states cannot be ragged (`ChainCache`).

Shape suffixes: B batch, T positions, N candidates with the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor
from transformers import DynamicCache

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.chain_cache import ChainCache, ChainRow, as_steps, mixers_of
from headstart.heads.backbone.features import Features, stack_rows
from headstart.heads.backbone.images import Images
from headstart.inference.capture.capture import Capturer
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.tree import CandidateTree
from headstart.support.pytree import map_tensors


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
