"""Attention of drafted blocks in training: the elements of a block attend to its row up to an anchor, and to all of the block or, causally,
to its elements up to their own. With a window an element attends to so many positions up to its own, and a chunk to as many more keys.

Blocks of one row share the row's keys, so they are computed together, a few hundred elements at a time: their keys are the part of the
row that they need and all their own, of which a mask leaves each block its own. Fused attention keeps no scores, so memory is linear.

Shape suffixes: B rows, T positions, M blocks, A blocks per row (padded), N elements of a block, H query heads, G key heads, C head width,
S keys, K blocks of a chunk.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.backbone.features import Anchors
from headstart.heads.layers.causal_attention import document_starts

LEAST, MOST = 64, 256
"""Bounds of the elements of each row computed together, about a quarter of its length: their own keys are added to the row's."""


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of a batch, sorted by row and anchor."""

    place_M: Tensor
    """Each block's place among B rows of A blocks."""
    start_BA: Tensor
    """First position of the anchor's document."""
    anchor_BA: Tensor
    """Last position that the block attends to; -1 at padding."""
    chunks: tuple[tuple[int, int, int, int], ...]
    """(first block, last block + 1, first key, last key + 1) of the blocks computed together."""
    causal: bool = False
    """Elements attend to the elements of their block up to their own, not to all."""
    window: int | None = None
    """Positions up to its own that an element attends to; None: all."""

    def pad(self, x_MXNC: Tensor) -> Tensor:
        """Bring the blocks into rows: ``[B, A, X, N, C]``."""
        B, A = self.anchor_BA.shape
        rows = x_MXNC.new_zeros(B * A, *x_MXNC.shape[1:]).index_copy(0, self.place_M, x_MXNC)
        return rows.unflatten(0, (B, A))


def lay_out(
    at: Anchors, tokens_BT: Tensor, document_BT: Tensor | None, elements: int, causal: bool = False, window: int | None = None
) -> BlockLayout:
    """Lay out blocks of ``elements`` at anchors. A document is a run of equal numbers; copies the anchors to the host."""
    (B, T), device = tokens_BT.shape, tokens_BT.device
    row_M, position_M = at.row_M, at.position_M
    counts_B = torch.zeros(B, dtype=torch.int64, device=device).index_add(0, row_M, torch.ones_like(row_M))
    A = max(int(counts_B.max()), 1)
    number_M = torch.empty_like(row_M)
    number_M[(row_M * T + position_M).argsort(stable=True)] = torch.arange(len(row_M), device=device)
    place_M = row_M * A + number_M - (counts_B.cumsum(0) - counts_B)[row_M]
    packed = document_BT is not None and bool((document_BT > 0).any())
    starts_BT = document_starts(document_BT) if packed and document_BT is not None else torch.zeros_like(tokens_BT)
    anchor_BA = torch.full((B * A,), -1, device=device).index_copy(0, place_M, position_M).view(B, A)
    start_BA = torch.full((B * A,), T, device=device).index_copy(0, place_M, starts_BT[row_M, position_M]).view(B, A)
    last_A, first_A, nearest_A = anchor_BA.amax(0).cpu(), start_BA.amin(0).cpu(), anchor_BA.where(anchor_BA >= 0, T).amin(0).cpu()
    step, chunks = max(1, min(max(T // 4, LEAST), MOST) // elements), []
    for first in range(0, A, step):
        end = min(first + step, A)
        low = int(first_A[first:end].amin().item()) if packed else 0
        high = int(last_A[first:end].amax()) + 1
        if window is not None:  # no more keys than the first anchor's window and the anchors behind it
            low = max(low, min(int(nearest_A[first:end].amin()) + 2 - window, high - step - window))
        chunks.append((first, end, low, high))
    return BlockLayout(place_M, start_BA, anchor_BA, tuple(chunks), causal, window)


def attend_blocks(query_MHNC: Tensor, own: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], layout: BlockLayout) -> Tensor:
    """Return the attention output ``[M, H, N, C]`` over the rows' keys and values ``context`` (``[B, G, T, C]``) and the blocks' ``own``
    (``[M, G, N, C]``). Scores are divided by the square root of C.
    """
    mixed, sizes = [], [end - first for first, end, _, _ in layout.chunks]
    parts = (layout.pad(x).split(sizes, 1) for x in (query_MHNC, *own))  # slices would each have a gradient of full size
    for (first, end, low, high), query_BKHNC, *blocks in zip(layout.chunks, *parts, strict=True):
        keys, values = (
            torch.cat([text[:, :, low:high], block_BKGNC.transpose(1, 2).flatten(2, 3)], 2)
            for text, block_BKGNC in zip(context, blocks, strict=True)
        )
        mixed.append(_attend(query_BKHNC, keys, values, _allowed(layout, slice(first, end), slice(low, high), query_BKHNC.shape[3])))
    return torch.cat(mixed, 1).flatten(0, 1)[layout.place_M]


def _attend(query_BKHNC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, allowed_BKNS: Tensor) -> Tensor:
    """Compute one chunk: ``[B, K, H, N, C]``. Query heads that share a key head are further queries of it."""
    G, (_, K, H, N, _) = keys_BGSC.shape[1], query_BKHNC.shape
    query_BGQC = query_BKHNC.unflatten(2, (G, H // G)).permute(0, 2, 3, 1, 4, 5).flatten(2, 4)
    mask_B1QS = allowed_BKNS[:, None].expand(-1, H // G, -1, -1, -1).flatten(1, 3)[:, None]
    mixed_BGQC = torch.nn.functional.scaled_dot_product_attention(query_BGQC, keys_BGSC, values_BGSC, attn_mask=mask_B1QS)
    return mixed_BGQC.unflatten(2, (H // G, K, N)).permute(0, 3, 1, 2, 4, 5).flatten(2, 3)


def _allowed(layout: BlockLayout, part: slice, past: slice, elements: int) -> Tensor:
    """Return the mask ``[B, K, N, S]`` of one chunk, True where an element attends: its row's part, then the chunk's own keys."""
    anchor_BK1, start_BK1 = layout.anchor_BA[:, part, None], layout.start_BA[:, part, None]
    key_S = torch.arange(past.start, past.stop, device=anchor_BK1.device)
    text_BKNS = ((key_S <= anchor_BK1) & (key_S >= start_BK1))[:, :, None].expand(-1, -1, elements, -1)
    if layout.window is not None:  # element i is at the position 1 + i after the anchor
        offset_N1 = torch.arange(elements, device=key_S.device)[:, None] + 1
        text_BKNS = text_BKNS & (key_S > anchor_BK1[..., None] + offset_N1 - layout.window)
    B, K = anchor_BK1.shape[:2]
    eye_KK, seen_NN = torch.eye(K, dtype=torch.bool, device=key_S.device), seen_elements(elements, layout.causal, key_S.device)
    own_KNKN = eye_KK[:, None, :, None] & seen_NN[:, None]
    return torch.cat([text_BKNS, own_KNKN.flatten(2)[None].expand(B, -1, -1, -1)], -1)


def seen_elements(elements: int, causal: bool, device: torch.device) -> Tensor:
    """Return the mask ``[N, N]`` of a block, True where an element attends to another."""
    all_NN = torch.ones(elements, elements, dtype=torch.bool, device=device)
    return all_NN.tril() if causal else all_NN
