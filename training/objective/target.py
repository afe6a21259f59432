"""The backbone's hidden states at drafted tokens, from one forward pass that continues the KV cache of the batch.

Shape suffixes: B batch, T positions, M drafts, R drafts of a row, N drafted tokens of a draft, D width, X drafted tokens of a row (R N).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.heads.anchors import Anchors
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.training.data.packing import document_positions
from headstart.training.features.on_policy import FeaturesWithCache
from headstart.training.objective.anchors import number_within


def target_hidden(backbone: Backbone, features: FeaturesWithCache, at: Anchors, drafted_MN: Tensor) -> Tensor:
    """Return the backbone's final hidden states at the drafted tokens, ``[M, N, D]``."""
    B, N = len(features.tokens_BT), drafted_MN.shape[1]
    rank_M = torch.zeros_like(at.row_M)
    by_row_M = at.row_M.argsort(stable=True)
    rank_M[by_row_M] = number_within(at.row_M[by_row_M])
    R = int(rank_M.max()) + 1
    tokens_BRN = drafted_MN.new_zeros(B, R, N)
    tokens_BRN[at.row_M, rank_M] = drafted_MN
    anchor_BR = drafted_MN.new_full((B, R), -2)   # no draft: attends to no past position
    anchor_BR[at.row_M, rank_M] = at.position_M
    positions_BX, attention_mask = _masks(features, anchor_BR, N, backbone.windows)
    if backbone.max_positions is not None:   # tokens past the document's end have no weight
        positions_BX = positions_BX.clamp(max=backbone.max_positions - 1)
    assert features.cache is not None
    kept = [(layer.keys, layer.values) for layer in features.cache.layers]
    try:
        hidden_BXD = backbone.read(tokens_BRN.flatten(1), features.cache, positions_BX, attention_mask).hidden_BTD
    finally:   # restore the cache for the next drafter
        for layer, (keys, values) in zip(features.cache.layers, kept, strict=True):
            layer.keys, layer.values = keys, values
    return hidden_BXD.unflatten(1, (R, N))[at.row_M, rank_M]


def _masks(features: Features, anchor_BR: Tensor, count: int, windows: dict[str, int | None]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the drafted tokens' positions, ``[B, X]``, and each kind of layer's mask ``[B, X, T + X]`` over past positions and drafts."""
    assert features.document_BT is not None
    (B, R), T = anchor_BR.shape, features.tokens_BT.shape[1]
    ahead_N, place_T = (torch.arange(n, device=anchor_BR.device) for n in (count, T))
    position_BT, at_BR = document_positions(features.document_BT), anchor_BR.clamp(min=0)
    position_BRN = position_BT.gather(1, at_BR)[..., None] + 2 + ahead_N
    same_BRT = features.document_BT.gather(1, at_BR)[..., None] == features.document_BT[:, None]
    text_BRT = same_BRT & (place_T <= anchor_BR[..., None] + 1)
    back_NN = ahead_N[:, None] - ahead_N
    alone_RR = torch.eye(R, dtype=torch.bool, device=anchor_BR.device)
    attention_mask = {}
    for kind, window in windows.items():
        text_BRNT, causal_NN = text_BRT[:, :, None].expand(-1, -1, count, -1), back_NN >= 0
        if window is not None:
            text_BRNT = text_BRNT & (position_BRN[..., None] - position_BT[:, None, None] < window)
            causal_NN = causal_NN & (back_NN < window)
        drafts_XX = (alone_RR[:, None, :, None] & causal_NN[:, None]).reshape(R * count, R * count)
        attention_mask[kind] = torch.cat([text_BRNT.flatten(1, 2), drafts_XX.expand(B, -1, -1)], -1)
    return position_BRN.flatten(1), attention_mask
