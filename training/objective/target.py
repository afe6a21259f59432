"""The backbone's hidden states at drafted tokens, from one forward pass that continues the KV cache of the batch.

Shape suffixes: B batch, T positions, M drafts, R drafts of a row, N drafted tokens of a draft, D width, X drafted tokens of a row (R N).
"""

from __future__ import annotations

from torch import Tensor

from headstart.heads.anchors import Anchors, anchors_by_row
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.layers.document_mask import draft_masks
from headstart.training.features.on_policy import FeaturesWithCache


def target_hidden(backbone: Backbone, features: FeaturesWithCache, at: Anchors, drafted_MN: Tensor) -> Tensor:
    """Return the backbone's final hidden states at the drafted tokens, ``[M, N, D]``."""
    assert features.cache is not None and features.document_BT is not None
    B, N = len(features.tokens_BT), drafted_MN.shape[1]
    rank_M, anchor_BR = anchors_by_row(at, B)
    R = anchor_BR.shape[1]
    tokens_BRN = drafted_MN.new_zeros(B, R, N)
    tokens_BRN[at.row_M, rank_M] = drafted_MN
    positions_BX, attention_mask = draft_masks(features.document_BT, anchor_BR, N, backbone.windows)
    if backbone.max_positions is not None:   # tokens past the document's end have no weight
        positions_BX = positions_BX.clamp(max=backbone.max_positions - 1)
    kept = [(layer.keys, layer.values) for layer in features.cache.layers]
    try:
        hidden_BXD = backbone.read(tokens_BRN.flatten(1), features.cache, positions_BX, attention_mask).hidden_BTD
    finally:   # restore the cache for the next drafter
        for layer, (keys, values) in zip(features.cache.layers, kept, strict=True):
            layer.keys, layer.values = keys, values
    return hidden_BXD.unflatten(1, (R, N))[at.row_M, rank_M]
