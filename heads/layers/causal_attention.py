"""Attention of every position to those before it in its document, in blocks: memory grows with the length, not with its square.

A block is a run of queries, which take the keys from the beginning of their earliest document to their own end; keys of other
documents and of the future cost nothing. A block's scores live while it is worked on and are made again for the gradients
(compare 2205.14135), so that what is left is the result and its log-sum-exp, by which further scores can join the softmax.

Shape suffixes: B batch, T positions, S keys, H heads, G heads of keys, R heads of queries a head of keys, C head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headstart.heads.layers.chunking import ChunkPolicy, chunk_policy

CACHED, HELD = 2**18, 2**27
"""Scores of a block: on a CPU those that stay in its caches (1 MB in fp32), on an accelerator 512 MB of them."""
LEAST, MOST = 64, 512
"""Queries of a block; no more than the longest document has, since a block takes the keys of all documents it touches."""


@dataclass(frozen=True)
class Blocks:
    """How rows of some positions are divided."""

    bounds: tuple[tuple[int, int, int], ...]
    """Of each block: its first query, the one behind its last, and the first key that any of them sees."""
    starts_BT: Tensor | None
    """The first position of each position's document; None: 0."""
    policy: ChunkPolicy = field(default_factory=chunk_policy)

    def upto(self, positions: int) -> Iterator[tuple[int, int, int]]:
        """The bounds, as far as there are that many positions."""
        yield from self.policy.select([(first, min(end, positions), low) for first, end, low in self.bounds if first < positions])

    def barred(self, first: int, end: int, low: int, device: torch.device) -> Tensor:
        """``[1 or B, 1, 1, end - first, end - low]``: True where a query of the block does not see a key."""
        key_S = torch.arange(low, end, device=device)
        barred_TS = key_S > torch.arange(first, end, device=device)[:, None]
        if self.starts_BT is None:
            return barred_TS[None, None, None]
        return (barred_TS | (key_S < self.starts_BT[:, first:end, None]))[:, None, None]


def divide(document_BT: Tensor | None, shape: tuple[int, int, int], device: torch.device) -> Blocks:
    """Blocks for rows of ``shape`` (B, H, T); documents are runs of one number. Reads the documents on the host."""
    B, H, T = shape
    starts_BT, span = None, T
    if document_BT is not None and bool((documents := document_BT[:, :T].cpu()).gt(0).any()):
        place_T, new_BT = torch.arange(T), torch.ones(B, T, dtype=torch.bool)
        new_BT[:, 1:] = documents[:, 1:] != documents[:, :-1]
        starts_BT = torch.where(new_BT, place_T, 0).cummax(1).values
        span = int((place_T - starts_BT).max()) + 1
    on_cpu = (chunk_policy().device_type or device.type) == "cpu"
    rows = max(LEAST, min(MOST, span, (CACHED if on_cpu else HELD) // (B * H * span)))
    firsts = range(0, T, rows)
    lows = [0 for _ in firsts] if starts_BT is None else starts_BT[:, ::rows].amin(0).tolist()
    bounds = tuple((first, min(first + rows, T), low) for first, low in zip(firsts, lows, strict=True))
    return Blocks(bounds, None if starts_BT is None else starts_BT.to(device))


def attend_past(query_BHTC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """What each position takes from the values up to its own, ``[B, H, T, C]``, and the log of what its softmax divides by, ``[B, H, T]``.

    Scores are divided by the root of C. S is at least T; H is a multiple of G. Both results carry gradients.
    """
    return _Past.apply(query_BHTC, keys_BGSC, values_BGSC, blocks)


def join(query_BHTC: Tensor, mixed_BHTC: Tensor, logsum_BHT: Tensor, others: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The result of `attend_past` with more in its softmax: keys and values ``[B, G, T, C]`` that each position alone sees at its place."""
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
        for first, end, low in blocks.upto(query_BHTC.shape[2]):
            scores = _scores(scaled_BGRTC, keys_BGSC, blocks, (first, end, low))
            most = scores.amax(-1, keepdim=True)
            weights = scores.sub_(most).exp_()
            total = weights.sum(-1, keepdim=True)
            taken = _times(weights.to(values_BGSC.dtype), values_BGSC[:, :, low:end])
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
        for first, end, low in ctx.blocks.upto(query_BHTC.shape[2]):
            part, past = (slice(None), slice(None), slice(None), slice(first, end)), (slice(None), slice(None), slice(low, end))
            weights = _scores(scaled, keys_BGSC, ctx.blocks, (first, end, low)).sub_(logsum[part]).exp_()
            by_values[past] += _summed(weights.to(values_BGSC.dtype), by_mixed[part])
            by_scores = _times(by_mixed[part], values_BGSC[past].mT).to(wide).sub_(less[part]).mul_(weights).to(keys_BGSC.dtype)
            by_query[part] = _times(by_scores, keys_BGSC[past]) * scale
            by_keys[past] += _summed(by_scores, scaled[part])
        return by_query.flatten(1, 2), by_keys.to(keys_BGSC.dtype), by_values.to(values_BGSC.dtype), None


def _grouped(x_BHTC: Tensor, keys_BGSC: Tensor) -> Tensor:
    """``[B, G, R, T, C]``."""
    return x_BHTC.unflatten(1, (keys_BGSC.shape[1], -1))


def _times(x_BGRTX: Tensor, other_BGXY: Tensor) -> Tensor:
    """``[B, G, R, T, Y]``: one product a head of keys."""
    return (x_BGRTX.flatten(2, 3) @ other_BGXY).unflatten(2, x_BGRTX.shape[2:4])


def _summed(x_BGRTS: Tensor, y_BGRTC: Tensor) -> Tensor:
    """``[B, G, S, C]``: summed over the queries of a head of keys."""
    return x_BGRTS.flatten(2, 3).mT @ y_BGRTC.flatten(2, 3)


def _scores(scaled_BGRTC: Tensor, keys_BGSC: Tensor, blocks: Blocks, bounds: tuple[int, int, int]) -> Tensor:
    """``[B, G, R, T, S]`` of a block, in fp32 or wider; -inf where barred."""
    first, end, low = bounds
    scores = _times(scaled_BGRTC[:, :, :, first:end], keys_BGSC[:, :, low:end].mT)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if blocks.starts_BT is None:   # what lies before the block is seen by all of it
        scores[..., first - low :].masked_fill_(blocks.barred(first, end, first, scores.device), float("-inf"))
        return scores
    return scores.masked_fill_(blocks.barred(first, end, low, scores.device), float("-inf"))
