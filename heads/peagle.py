"""P-EAGLE (2602.01469): the heads of eagle3.py draft all depths in one pass.

The pairs up to the root are EAGLE-3's, and the last one drafts depth 0. After it follow ``depth - 1`` mask pairs, the k-th of which
drafts depth k: in place of a token and the backbone's taps, which are not known yet, they have a mask token and one trained vector of
taps, ``mask_hidden``. A mask pair attends to the pairs up to the root and to the masks before it. Depth 0 is trained at all positions;
masks are trained at sampled anchors, so that few are added to a sequence, and the real pairs of a row are computed once for all of them.

Names are those of EAGLE-3 and ``mask_hidden``, as vLLM expects. Heads trained by speculators also have an embedding of their own.

Shape suffixes: B batch, T positions, M anchors, N masks, K depth, D width, X taps concatenated, C head width.
"""

from dataclasses import replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Anchors, Features, dense_from_anchors
from headstart.heads.eagle import State
from headstart.heads.eagle3 import FusedTapsConfig, FusedTapsDrafter
from headstart.heads.layers.block_attention import BlockLayout, attend_blocks, lay_out, seen_elements
from headstart.heads.layers.cached_layers import Pass
from headstart.heads.layers.causal_attention import divide
from headstart.heads.layers.decoder_layer import Rotation, rotary_at
from headstart.heads.layers.draft_cache import NodeSlots
from headstart.heads.layers.start_values import probe
from headstart.support.config import MAX_DEPTH, Layers
from headstart.support.errors import UserError


class Peagle(FusedTapsDrafter):
    """A few layers over the pairs and the mask pairs, once per draft."""

    class Config(FusedTapsConfig):
        depth: Annotated[int, Ge(2), Le(MAX_DEPTH)] = 8
        """Tokens drafted beyond the root: one at the root and one at each of the mask pairs, which are one fewer."""
        layers: Layers = 4
        """Decoder layers; a later one reads the output of the one before."""
        deeper_share: Annotated[float, Gt(0), Le(1)] = 0.5
        """Share of the label positions, drawn anew at each step, at which depths after the first, the mask pairs, are trained."""
        mask_token: Annotated[int, Ge(0)] | None = None
        """Token of the mask pairs (null: the last of the vocabulary, which is padding in many models)."""
        own_embedding: bool = False
        """Train an embedding of the head's own, as speculators does (false: the backbone's)."""

    config: Config
    sequential = deepens = False
    all_depths_at_once = True
    fixed_arguments = ("norm_before_residual", "sliding_window", "layer", "mask_token")

    def __init__(self, backbone: Backbone, config: Config) -> None:
        mask = backbone.vocab - 1 if config.mask_token is None else config.mask_token
        if mask >= backbone.vocab:
            raise UserError(f"drafter.mask_token is a token of the vocabulary, from 0 to {backbone.vocab - 1}; got {mask}")
        super().__init__(backbone, config.model_copy(update={"mask_token": mask}))
        self.mask_token, self.deeper_share = mask, config.deeper_share
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, self.fc.in_features))
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(backbone.vocab, backbone.dim)

    def init_from(self, backbone: Backbone) -> None:
        """Initialise the layers as EAGLE-3's, ``mask_hidden`` as the middle one of the taps, and an own embedding as the backbone's."""
        super().init_from(backbone)
        self.mask_hidden.copy_(probe(backbone, self.taps).concatenated(self.taps).median(1, keepdim=True).values)
        if self.config.own_embedding:
            self.embed_tokens.weight.copy_(backbone.embed(torch.arange(backbone.vocab, device=backbone.device)))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embed_tokens(tokens) if self.config.own_embedding else super().embed(tokens)

    def _mask_state(self) -> Tensor:
        """Fuse ``mask_hidden`` as taps are: ``[1, 1, D]``."""
        return self.fc(self._normed(self.mask_hidden).to(self.fc.weight.dtype))

    # Training.

    def forward(self, features: Features, at: Anchors | None = None) -> list[Tensor]:
        if at is None:
            return dense_from_anchors(lambda anchors: self.forward(features, anchors), features.tokens_BT)
        text_BTD, masks_MND = self._train(features, at)
        return [text_BTD[at.row_M, at.position_M], *masks_MND.unbind(1)]

    def forward_deeper(self, features: Features, deeper: Anchors) -> list[Tensor]:
        text_BTD, masks_MND = self._train(features, deeper)
        return [text_BTD[:, : max(text_BTD.shape[1] - 2, 0)], *masks_MND.unbind(1)]

    def forward_dense(self, features: Features, place_BR: Tensor | None = None) -> list[Tensor]:
        assert place_BR is None, "a pass over places is EAGLE-3's"
        return self.forward(features)

    def _train(self, features: Features, at: Anchors) -> tuple[Tensor, Tensor]:
        """Return the output ``[B, T, D]`` at the real pairs and ``[M, N, D]`` at the mask pairs of every anchor."""
        tokens_BT, N = features.tokens_BT, self.trained_depth - 1
        (B, T), device, window = tokens_BT.shape, tokens_BT.device, self.config.sliding_window
        blocks = divide(features.document_BT, (B, self.layer_config.num_attention_heads, T), device, window)
        next_BT = tokens_BT.roll(-1, 1)  # at a row's last position, from which nothing is drafted, it is any token
        text_BTD, known = self.checkpointed(self._train_pass)(self.embed(next_BT), self.states(features), (), blocks)
        layout = lay_out(at, tokens_BT, features.document_BT, N, True, window)
        positions_MN = at.position_M[:, None] + 1 + torch.arange(N, device=device)
        rotation = rotary_at(self.cached.rotary.table(T + N, device), positions_MN)
        return text_BTD, self.checkpointed(self._train_masks)(known, rotation, layout)

    def _train_masks(self, known: Pass, rotation: Rotation, layout: BlockLayout) -> Tensor:
        """Return the output ``[M, N, D]`` at the mask pairs of every anchor; ``known``: each layer's keys and values of the real pairs."""
        mask_11 = torch.full((1, 1), self.mask_token, device=self.mask_hidden.device)
        streams: tuple[Tensor, ...] = self.streams(self.embed(mask_11), self._mask_state())  # alike at first, but for their rotation
        for cached, text in zip(self.cached.layers, known, strict=True):
            layer, x = cached.layer, cached.layer.inputs(*streams)
            query_MHNC, keys_MGNC, values = layer.self_attn.project(x, rotation)
            own = keys_MGNC, values.expand_as(keys_MGNC)
            streams = (layer.finish(streams[-1], attend_blocks(query_MHNC, own, text, layout), x),)
        return streams[0]

    # Decoding.

    def reserve(self, state: State, length: int) -> State:
        return state.reserve(length + self.trained_depth)  # all masks are read, however few of the drafts a tree takes

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        (B, _), K, device = tokens_BN.shape, self.trained_depth, tokens_BN.device
        embedded_BKD = self.embed(torch.cat([tokens_BN[:, :1], tokens_BN.new_full((B, K - 1), self.mask_token)], 1))
        state_BKD = torch.cat([state.pending_BD[:, None], self._mask_state().expand(B, K - 1, -1)], 1)
        offsets_K, seen_BKK = torch.arange(K, device=device), seen_elements(K, True, device).expand(B, -1, -1)
        nodes = NodeSlots.block(state.caches[0], seen_BKK, offsets_K, self.config.sliding_window)
        hidden_BKD, caches = self.cached.attend_nodes(state.caches, self.streams(embedded_BKD, state_BKD), nodes, offsets_K)
        return hidden_BKD, replace(state, caches=caches)

    # On disk.

    def engine_config(self) -> dict[str, Any]:
        """Return EAGLE-3's configuration and parallel drafts; engines, and versions of one, look for the mask under three names."""
        mask = dict.fromkeys(("mask_token_id", "pard_token", "ptd_token_id"), self.mask_token)
        return super().engine_config() | mask | {"parallel_drafting": True}
