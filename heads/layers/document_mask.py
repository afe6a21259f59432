"""Attention masks of packed rows: documents are independent of each other, and drafts begin inside them.

Shape suffixes: B batch, T positions, R drafts of a row, N tokens of a draft, X drafted tokens of a row (R N).
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_positions(document_BT: Tensor) -> Tensor:
    """Return each token's position within its document, ``[B, T]``."""
    position_T = torch.arange(document_BT.shape[1], device=document_BT.device)
    first_BT = torch.ones_like(document_BT, dtype=torch.bool)
    first_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    return position_T - torch.where(first_BT, position_T, 0).cummax(1).values


def document_masks(document_BT: Tensor, windows: dict[str, int | None]) -> dict[str, Tensor]:
    """Return the attention mask ``[B, T, T]`` of each kind of layer: causal, within the document and the layer's window."""
    T = document_BT.shape[1]
    position_T = torch.arange(T, device=document_BT.device)
    distance_TT = position_T[:, None] - position_T
    allowed_BTT = (document_BT[:, :, None] == document_BT[:, None, :]) & (distance_TT >= 0)
    return {kind: allowed_BTT if window is None else allowed_BTT & (distance_TT < window) for kind, window in windows.items()}


def draft_masks(
    document_BT: Tensor, anchor_BR: Tensor, count: int, windows: dict[str, int | None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return positions ``[B, X]`` and each kind of layer's mask ``[B, X, T + X]`` of R drafts of ``count`` tokens that continue a row.

    A draft at anchor t attends to its document up to ``x_{t+1}`` and to its own earlier tokens, of which the first is at position t+2.
    An anchor of -2 attends to no document.
    """
    (B, R), T = anchor_BR.shape, document_BT.shape[1]
    ahead_N, place_T = (torch.arange(n, device=anchor_BR.device) for n in (count, T))
    position_BT, at_BR = document_positions(document_BT), anchor_BR.clamp(min=0)
    position_BRN = position_BT.gather(1, at_BR)[..., None] + 2 + ahead_N
    same_BRT = document_BT.gather(1, at_BR)[..., None] == document_BT[:, None]
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
