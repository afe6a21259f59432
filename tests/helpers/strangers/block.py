"""A parallel block head (DFlash-like) as a user of the project would write it: one pass over the root and mask tokens.

Every block element attends to the backbone's hidden states up to t and to the whole block. A block for every position would cost
too much, so it is trained at anchors. Shape suffixes: B batch, T positions, M anchors, K depth, D width, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Anchors, Features, dense_from_anchors
from headstart.heads.base import Drafter, DrafterConfig
from headstart.heads.kv.cached_layers import CachedLayer
from headstart.heads.kv.draft_cache import DraftCache
from headstart.heads.kv.rows import RowState
from headstart.heads.layers.decoder_layer import DecoderLayer, Norm, Rotary, rotary_at
from headstart.heads.layers.layer_config import llama_like


@dataclass(frozen=True)
class State(RowState):
    cache: DraftCache
    """Keys and values of the context."""


class Block(Drafter):
    class Config(DrafterConfig):
        depth: Annotated[int, Ge(1)] = 3

    sequential = False
    all_depths_at_once = True
    capturable = True
    anchor_share = 0.5

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__(backbone, config)
        layer_config = llama_like(backbone, None)
        self.context = nn.Linear(backbone.dim, backbone.dim, bias=False)
        self.masks = nn.Embedding(config.depth, backbone.dim)
        """Row 0 is added to the root's embedding at element 0; the other elements are the mask embeddings themselves."""
        self.layer = DecoderLayer(layer_config)
        self.norm = Norm(backbone.dim, eps=layer_config.rms_norm_eps)
        self.lm_head = nn.Linear(backbone.dim, backbone.vocab, bias=False)
        self.cached = CachedLayer(self.layer, Rotary(layer_config))

    def init_from(self, backbone: Backbone) -> None:
        super().init_from(backbone)
        self.lm_head.weight.copy_(backbone.unembed.weight)

    @property
    def max_depth(self) -> int:
        return self.trained_depth

    def _context(self, hidden_BTD: Tensor) -> Tensor:
        return self.layer.inputs(self.context(hidden_BTD.to(self.context.weight.dtype)))

    def _block(self, roots_M: Tensor) -> Tensor:
        """The block ``[M, K, D]``: the root, then masks."""
        masks_KD = self.masks.weight
        first_MD = self.backbone.embed(roots_M).to(masks_KD.dtype) + masks_KD[0]
        return torch.cat([first_MD[:, None], masks_KD[1:].expand(len(roots_M), -1, -1)], 1)

    def forward(self, features: Features, at: Anchors | None = None) -> list[Tensor]:
        tokens_BT = features.tokens_BT
        if at is None:
            return dense_from_anchors(lambda anchors: self.forward(features, anchors), tokens_BT)
        T, K, device = tokens_BT.shape[1], self.trained_depth, tokens_BT.device
        keys_values = self.layer.keys_values(self._context(features.hidden_BTD), self.cached.rotary(0, T, device))
        block_MKD = self._block(tokens_BT[at.row_M, (at.position_M + 1).clamp(max=T - 1)])
        x_MKD = self.layer.inputs(block_MKD)
        positions_MK = at.position_M[:, None] + 1 + torch.arange(K, device=device)
        rotation = rotary_at(self.cached.rotary.table(T + K, device), positions_MK)
        query, *block_kv = self.layer.self_attn.project(x_MKD, rotation)
        keys, values = (torch.cat([text[at.row_M], block], 2) for text, block in zip(keys_values, block_kv, strict=True))
        text_MT = torch.arange(T, device=device) <= at.position_M[:, None]
        if features.document_BT is not None:
            document_MT = features.document_BT[at.row_M]
            text_MT = text_MT & (document_MT == document_MT.gather(1, at.position_M[:, None]))
        mask_MS = torch.cat([text_MT, text_MT.new_ones(len(text_MT), K)], 1)
        hidden_MKD = self.layer.attend(query, block_MKD, x_MKD, (keys, values), mask_MS[:, None].expand(-1, K, -1))
        return list(hidden_MKD.unbind(1))

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def begin(self, features: Features, state: State | None = None) -> State:
        cache, counts_B = self.cached.empty(features.tokens_BT) if state is None else state.cache, features.lengths_B
        offsets_BT = self.cached.kept_offsets(cache, features.tokens_BT.shape[1], counts_B)
        hidden_BTD = features.hidden_BTD.gather(1, offsets_BT[..., None].expand(-1, -1, features.hidden_BTD.shape[-1]))
        return State(self.cached.extend(cache, self._context(hidden_BTD), offsets_BT, counts_B))

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        block_BKD, K = self._block(tokens_BN[:, 0]), self.trained_depth
        everyone_BKK = torch.ones(len(tokens_BN), K, K, dtype=torch.bool, device=tokens_BN.device)
        offsets_K = torch.arange(K, device=tokens_BN.device)
        hidden_BKD, cache = self.cached.attend_block(state.cache, self.layer.inputs(block_BKD), block_BKD, everyone_BKK, offsets_K)
        return hidden_BKD, replace(state, cache=cache)

    def engine_config(self) -> dict[str, Any]:
        return {"architectures": ["BlockDrafter"], "hidden_size": self.backbone.dim, "block_size": self.trained_depth}
