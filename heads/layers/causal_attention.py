"""Causal attention within documents, optionally within a sliding window, in blocks so that memory grows linearly with the length.

A block is a range of consecutive queries; its keys range from the start of their earliest document to the last query, and other keys
are not computed with. Scores exist for one block at a time and are recomputed for the gradients (as in 2205.14135). The log-sum-exp
is returned too, so that more scores can be added to the softmax.

Shape suffixes: B batch, T positions, S keys, H query heads, G key heads, R query heads per key head, C head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headstart.support.devices import holding

T = TypeVar("T")


@dataclass(frozen=True)
class ChunkPolicy:
    """Chunk sizes and which chunks to run. The default runs all, sized for the tensors' device."""

    device_type: str | None = None
    """Device type to size chunks for; None: that of the tensors."""
    ends_only: bool = False
    """Run only the first two chunks and the last: results are wrong, but peak memory is that of a full run."""

    def select(self, pieces: list[T]) -> list[T]:
        return pieces if not self.ends_only or len(pieces) < 4 else [*pieces[:2], pieces[-1]]


_policy: ContextVar[ChunkPolicy] = ContextVar("chunk_policy")


def chunk_policy() -> ChunkPolicy:
    """Return the policy of the innermost `use_chunk_policy`, or the default."""
    return _policy.get(ChunkPolicy())


def use_chunk_policy(policy: ChunkPolicy) -> AbstractContextManager[None]:
    return holding(_policy, policy)


def document_starts(document_BT: Tensor) -> Tensor:
    """Return the first position of each token's document, ``[B, T]``. A document is a run of equal numbers."""
    position_T = torch.arange(document_BT.shape[1], device=document_BT.device)
    first_BT = torch.ones_like(document_BT, dtype=torch.bool)
    first_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    return torch.where(first_BT, position_T, 0).cummax(1).values


def document_positions(document_BT: Tensor) -> Tensor:
    """Return each token's position within its document, ``[B, T]``."""
    return torch.arange(document_BT.shape[1], device=document_BT.device) - document_starts(document_BT)


def document_masks(document_BT: Tensor, windows: dict[str, int | None]) -> dict[str, Tensor]:
    """Return the attention mask ``[B, T, T]`` of each kind of layer: causal, within the document and the layer's window."""
    T = document_BT.shape[1]
    position_T = torch.arange(T, device=document_BT.device)
    distance_TT = position_T[:, None] - position_T
    allowed_BTT = (document_BT[:, :, None] == document_BT[:, None, :]) & (distance_TT >= 0)
    return {kind: allowed_BTT if window is None else allowed_BTT & (distance_TT < window) for kind, window in windows.items()}


def draft_masks(document_BT: Tensor, anchor_BR: Tensor, count: int, windows: dict[str, int | None]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return positions ``[B, X]`` and each kind of layer's mask ``[B, X, T + X]`` of R drafts of ``count`` tokens that continue a row.

    A draft at anchor t attends to its document up to ``x_{t+1}`` and to its own earlier tokens, of which the first is at position t+2.
    An anchor of -2 attends to no document.

    Here R is the drafts of a row, N the tokens of a draft, and X the drafted tokens of a row (R N).
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


CACHED, HELD = 2**18, 2**27
"""Scores per block: on a CPU as many as fit its caches (1 MB in fp32), on an accelerator 512 MB."""
LEAST, MOST = 64, 512
"""Bounds of the queries per block. A block takes the keys of all documents it touches, so it is no longer than the longest."""
Bounds = tuple[int, int, int, int]
"""(first query, last query + 1, first key, last key + 1) of a block."""


@dataclass(frozen=True)
class Blocks:
    """Division of rows into blocks of queries."""

    bounds: tuple[Bounds, ...]
    starts_BT: Tensor | None
    """Start of each query's document; None: 0."""
    window: int | None = None
    """A query attends to this many positions up to its own (None: all)."""
    places_BT: Tensor | None = None
    """Position of each query; None: its index."""
    policy: ChunkPolicy = field(default_factory=chunk_policy)

    def upto(self, positions: int) -> Iterator[Bounds]:
        """Yield the bounds clipped to ``positions`` queries, as selected by the chunk policy."""
        inside = [self._clip(bounds, positions) for bounds in self.bounds if bounds[0] < positions]
        yield from self.policy.select(inside)

    def at(self, places_BR: Tensor) -> Blocks:
        """Return the blocks of the queries at these positions alone, which ascend in each row."""
        size = max(end - first for first, end, *_ in self.bounds)
        firsts = range(0, places_BR.shape[1], size)
        starts_BR = None if self.starts_BT is None else self.starts_BT.gather(1, places_BR)
        lows = [0 for _ in firsts] if starts_BR is None else starts_BR[:, ::size].amin(0).tolist()
        keys = self.bounds[-1][3]
        bounds = tuple((first, min(first + size, places_BR.shape[1]), low, keys) for first, low in zip(firsts, lows, strict=True))
        return replace(self, bounds=bounds, starts_BT=starts_BR, places_BT=places_BR)

    def at_pass(self, k: int) -> Blocks:
        """Return the blocks for queries that stand ``k`` positions further than their index: their window ends earlier."""
        return self if self.window is None else replace(self, window=self.window - k)

    def _clip(self, bounds: Bounds, positions: int) -> Bounds:
        if self.places_BT is not None:
            return bounds
        first, end, low = bounds[0], min(bounds[1], positions), bounds[2]
        return first, end, low if self.window is None else max(low, first - self.window + 1), end

    def barred(self, bounds: Bounds, device: torch.device) -> Tensor:
        """Return the mask ``[1 or B, 1, 1, queries, keys]`` of a block, True where a query does not attend to a key."""
        first, end, low, high = bounds
        key_S = torch.arange(low, high, device=device)
        query_BT1 = (torch.arange(first, end, device=device)[None] if self.places_BT is None else self.places_BT[:, first:end])[..., None]
        barred_BTS = key_S > query_BT1
        if self.window is not None:
            barred_BTS = barred_BTS | (key_S <= query_BT1 - self.window)
        if self.starts_BT is not None:
            barred_BTS = barred_BTS | (key_S < self.starts_BT[:, first:end, None])
        return barred_BTS[:, None, None]


def divide(document_BT: Tensor | None, shape: tuple[int, int, int], device: torch.device, window: int | None = None) -> Blocks:
    """Divide rows of ``shape`` (B, H, T) into blocks. A document is a run of equal numbers; copies ``document_BT`` to the host.

    ``window``: a query attends to this many positions up to its own (None: all).
    """
    B, H, T = shape
    starts_BT, span = None, T
    if document_BT is not None and bool((documents := document_BT[:, :T].cpu()).gt(0).any()):
        starts_BT = document_starts(documents)
        span = int((torch.arange(T) - starts_BT).max()) + 1
    span = span if window is None else min(span, window)
    on_cpu = (chunk_policy().device_type or device.type) == "cpu"
    rows = max(LEAST, min(MOST, span, (CACHED if on_cpu else HELD) // (B * H * span)))
    firsts = range(0, T, rows)
    lows = [0 for _ in firsts] if starts_BT is None else starts_BT[:, ::rows].amin(0).tolist()
    bounds = tuple((first, min(first + rows, T), low, min(first + rows, T)) for first, low in zip(firsts, lows, strict=True))
    return Blocks(bounds, None if starts_BT is None else starts_BT.to(device), window)


def attend_past(query_BHTC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return the attention output ``[B, H, T, C]`` and the log-sum-exp of the scores ``[B, H, T]``; both carry gradients.

    Scores are divided by the square root of C. S must be at least T, and H a multiple of G.
    """
    return _Past.apply(query_BHTC, keys_BGSC, values_BGSC, blocks)


def join(query_BHTC: Tensor, mixed_BHTC: Tensor, logsum_BHT: Tensor, others: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Add keys and values ``[B, G, T, C]`` to the softmax of `attend_past`; position t attends to theirs at t only."""
    query_BGRTC = query_BHTC.unflatten(1, (others[0][0].shape[1], -1))
    scale = query_BHTC.shape[-1] ** -0.5
    scores = [logsum_BHT, *((query_BGRTC * key[:, :, None]).sum(-1).flatten(1, 2) * scale for key, _ in others)]
    weights_BGRTJ = torch.stack(scores, -1).softmax(-1).unflatten(1, query_BGRTC.shape[1:3])
    joined_BGRTC = weights_BGRTJ[..., :1] * mixed_BHTC.unflatten(1, query_BGRTC.shape[1:3])
    for j, (_, value) in enumerate(others, 1):
        joined_BGRTC = joined_BGRTC + weights_BGRTJ[..., j : j + 1] * value[:, :, None]
    return joined_BGRTC.flatten(1, 2)


class _Past(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_BHTC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        mixed_BGRTC = _grouped(torch.empty_like(query_BHTC), keys_BGSC)
        scaled_BGRTC = _grouped(query_BHTC * query_BHTC.shape[-1] ** -0.5, keys_BGSC)
        wide = torch.promote_types(query_BHTC.dtype, torch.float32)
        logsum_BGRT = torch.empty(mixed_BGRTC.shape[:-1], dtype=wide, device=query_BHTC.device)
        for bounds in blocks.upto(query_BHTC.shape[2]):
            first, end, low, high = bounds
            scores = _scores(scaled_BGRTC, keys_BGSC, blocks, bounds)
            most = scores.amax(-1, keepdim=True)
            weights = scores.sub_(most).exp_()
            total = weights.sum(-1, keepdim=True)
            taken = _times(weights.to(values_BGSC.dtype), values_BGSC[:, :, low:high])
            mixed_BGRTC[:, :, :, first:end] = taken / total
            logsum_BGRT[:, :, :, first:end] = (most + total.log())[..., 0]
        mixed_BHTC, logsum_BHT = mixed_BGRTC.flatten(1, 2), logsum_BGRT.flatten(1, 2)
        ctx.save_for_backward(query_BHTC, keys_BGSC, values_BGSC, mixed_BHTC, logsum_BHT)
        ctx.set_materialize_grads(False)
        ctx.blocks = blocks
        return mixed_BHTC, logsum_BHT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_mixed_BHTC: Tensor | None, by_logsum_BHT: Tensor | None) -> tuple[Tensor | None, ...]:
        query_BHTC, keys_BGSC, values_BGSC, mixed_BHTC, logsum_BHT = ctx.saved_tensors
        by_mixed_BHTC = torch.zeros_like(mixed_BHTC) if by_mixed_BHTC is None else by_mixed_BHTC
        scale, wide = query_BHTC.shape[-1] ** -0.5, logsum_BHT.dtype
        less_BHT = (by_mixed_BHTC.to(wide) * mixed_BHTC).sum(-1)
        less_BHT = less_BHT if by_logsum_BHT is None else less_BHT - by_logsum_BHT
        by_mixed, less, logsum = (_grouped(x, keys_BGSC) for x in (by_mixed_BHTC, less_BHT[..., None], logsum_BHT[..., None]))
        scaled = _grouped(query_BHTC * scale, keys_BGSC)
        by_query = torch.empty_like(scaled)
        by_keys, by_values = (torch.zeros_like(x, dtype=wide) for x in (keys_BGSC, values_BGSC))
        for bounds in ctx.blocks.upto(query_BHTC.shape[2]):
            first, end, low, high = bounds
            part, past = (slice(None), slice(None), slice(None), slice(first, end)), (slice(None), slice(None), slice(low, high))
            weights = _scores(scaled, keys_BGSC, ctx.blocks, bounds).sub_(logsum[part]).exp_()
            by_values[past] += _summed(weights.to(values_BGSC.dtype), by_mixed[part])
            by_scores = _times(by_mixed[part], values_BGSC[past].mT).to(wide).sub_(less[part]).mul_(weights).to(keys_BGSC.dtype)
            by_query[part] = _times(by_scores, keys_BGSC[past]) * scale
            by_keys[past] += _summed(by_scores, scaled[part])
        return by_query.flatten(1, 2), by_keys.to(keys_BGSC.dtype), by_values.to(values_BGSC.dtype), None


def _grouped(x_BHTC: Tensor, keys_BGSC: Tensor) -> Tensor:
    """Split the heads: ``[B, G, R, T, C]``."""
    return x_BHTC.unflatten(1, (keys_BGSC.shape[1], -1))


def _times(x_BGRTX: Tensor, other_BGXY: Tensor) -> Tensor:
    """Multiply with one matrix per key head: ``[B, G, R, T, Y]``."""
    return (x_BGRTX.flatten(2, 3) @ other_BGXY).unflatten(2, x_BGRTX.shape[2:4])


def _summed(x_BGRTS: Tensor, y_BGRTC: Tensor) -> Tensor:
    """Multiply and sum over the queries of each key head: ``[B, G, S, C]``."""
    return x_BGRTS.flatten(2, 3).mT @ y_BGRTC.flatten(2, 3)


def _scores(scaled_BGRTC: Tensor, keys_BGSC: Tensor, blocks: Blocks, bounds: Bounds) -> Tensor:
    """Compute a block's scores ``[B, G, R, T, S]`` in fp32 or wider; -inf where masked."""
    first, end, low, high = bounds
    scores = _times(scaled_BGRTC[:, :, :, first:end], keys_BGSC[:, :, low:high].mT)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if blocks.starts_BT is None and blocks.window is None and blocks.places_BT is None:  # keys before the block need no mask
        scores[..., first - low :].masked_fill_(blocks.barred((first, end, first, high), scores.device), float("-inf"))
        return scores
    return scores.masked_fill_(blocks.barred(bounds, scores.device), float("-inf"))
