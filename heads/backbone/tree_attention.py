"""Attention of few queries beside a mask: those of a plain decoding step, or of a tree's nodes.

*Grouped-query heads.* transformers repeats keys and values for every query head whenever there is a mask and more than one query: on an
H100, 0.7 ms of a 9.5 ms forward pass of an 8B model with room for 1,024 positions, and more with longer contexts. Here they are shared.

*The same bits in bf16 on a CPU.* A sum's rounding depends on how many queries there are and on where a node's ancestors lie
among the keys, so a node of a tree would differ from the plain step that writes the same token. Summed in fp64 and rounded once, they
are equal. Linear layers and norms give a row the same bits alone and among others already, so decoding with drafts is then token-identical
in bf16 as well.

Shape suffixes: B batch, H query heads, G key heads, R query heads of a key head, N queries, M queries of a key head, S keys, X
keys of a block, Y blocks, C head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headstart.support.devices import is_accelerator

MAX_QUERIES = 256
"""With more queries, the keys are few beside them."""
MAX_EXACT = 64
"""Queries that are summed in fp64, which takes twice as long as in 16 bits: more than a tree on a CPU has, fewer than a prompt has."""
BLOCK = 512
"""Keys whose fp64 copies are made at a time; a captured pass keeps the number of blocks that it was captured with."""
FEW_ROWS = 2
"""Up to so many rows of at most `BLOCK` keys, torch's kernel is the fastest in fp64."""
_active: ContextVar[bool] = ContextVar("tree attention", default=False)
_one_operation: ContextVar[bool] = ContextVar("attention as one operation", default=False)


def attend(query_BHNC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, mask_B1NS: Tensor, scale: float | None = None) -> Tensor:
    """Return the attention output ``[B, H, N, C]``; ``mask_B1NS`` is boolean or additive, ``scale`` defaults to that of SDPA.

    On a CPU torch's kernel groups the heads; for a single query in bf16 it takes two to four times as long as in fp32 (LOG.md). On an
    accelerator its fast kernels do not group them, beside a mask, so the query heads of one key head become further queries.
    """
    if _is_one_operation(query_BHNC):
        return _few_queries(query_BHNC, keys_BGSC, values_BGSC, mask_B1NS, scale)
    if query_BHNC.device.type == "cpu" and query_BHNC.dtype == torch.bfloat16 and query_BHNC.shape[2] == 1:
        mask_B1NS = mask_B1NS.float() if mask_B1NS.is_floating_point() else mask_B1NS
        return attend(query_BHNC.float(), keys_BGSC.float(), values_BGSC.float(), mask_B1NS, scale).bfloat16()
    shared = bool(query_BHNC.shape[1] != keys_BGSC.shape[1])
    if not shared or not is_accelerator(query_BHNC.device):
        return scaled_dot_product_attention(query_BHNC, keys_BGSC, values_BGSC, mask_B1NS, scale=scale, enable_gqa=shared)
    return attend_as_queries(query_BHNC, keys_BGSC, values_BGSC, mask_B1NS, scale)


def attend_as_queries(query_BHNC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, mask_B1NS: Tensor, scale: float | None) -> Tensor:
    """The same, with the query heads of one key head as further queries of that head."""
    B, H, N, C = query_BHNC.shape
    G = keys_BGSC.shape[1]
    query_BGMC, mask_B1MS = query_BHNC.reshape(B, G, H // G * N, C), mask_B1NS.repeat(1, 1, H // G, 1)
    output_BGMC = scaled_dot_product_attention(query_BGMC, keys_BGSC, values_BGSC, mask_B1MS, scale=scale)
    return output_BGMC.reshape(B, H, N, values_BGSC.shape[-1])   # kernels differ in the order of their output's memory


def attend_exactly(query_BHNC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, mask_B1NS: Tensor, scale: float | None = None) -> Tensor:
    """The same with sums in fp64, rounded once to the query's dtype; ``mask_B1NS`` is additive and finite.

    Keys are taken in blocks, so that their fp64 copies stay in the CPU's caches: 8,000 keys of 8 heads of 128 take a single query 0.5
    of the time of torch's bf16 kernel, and 12 queries twice its time. In fp64 that kernel multiplies for every query head by itself: it
    has the fewest operations for a row or two of few keys, and for more rows is slower than one product for each key head (LOG.md).
    """
    slots = keys_BGSC.shape[2]
    blocks = 1 + ((int(slots) if torch.jit.is_tracing() else slots) - 1) // BLOCK
    if blocks == 1 and query_BHNC.shape[0] <= FEW_ROWS:
        return attend(query_BHNC.double(), keys_BGSC.double(), values_BGSC.double(), mask_B1NS.double(), scale).to(query_BHNC.dtype)
    query_BHNC = query_BHNC.double() * (query_BHNC.shape[-1] ** -0.5 if scale is None else scale)
    if blocks == 1:
        shares_BHNS = _scores(query_BHNC, keys_BGSC, mask_B1NS).softmax(-1)
        return _mixed(shares_BHNS, values_BGSC).to(values_BGSC.dtype)
    return _attend_in_blocks(query_BHNC, keys_BGSC, values_BGSC, mask_B1NS, blocks).to(values_BGSC.dtype)


@torch.library.custom_op("headstart::few_queries", mutates_args=(), device_types="cpu")
def few_queries(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same as one operation, which a compiler may have a kernel for; returns ``[B, N, H, C]``."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return attend_exactly(query, keys, values, mask, scale).transpose(1, 2).contiguous()


@few_queries.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    B, H, N, _ = query.shape
    return query.new_empty(B, N, H, values.shape[-1])


def _few_queries(query_BHNC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, mask_B1NS: Tensor, scale: float | None) -> Tensor:
    scale = query_BHNC.shape[-1] ** -0.5 if scale is None else scale
    output: Tensor = few_queries(query_BHNC, keys_BGSC, values_BGSC, mask_B1NS, scale)
    return output.transpose(1, 2)


def _is_one_operation(query_BHNC: Tensor) -> bool:
    return _one_operation.get() and query_BHNC.dtype != torch.float64 and bool(query_BHNC.shape[2] <= MAX_EXACT)


@contextmanager
def attention_as_one_operation() -> Iterator[None]:
    """Within this context, of this thread alone, attention of few queries is `few_queries`: for what is traced for a compiler on a CPU."""
    token = _one_operation.set(True)
    try:
        yield
    finally:
        _one_operation.reset(token)


def _attend_in_blocks(query_BHNC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, mask_B1NS: Tensor, blocks: int) -> Tensor:
    parts = [one.tensor_split(blocks, dim) for one, dim in ((keys_BGSC, 2), (values_BGSC, 2), (mask_B1NS, 3))]
    largest, total, output = [], [], []   # as if each block had all keys
    for keys_BGXC, values_BGXC, mask_B1NX in zip(*parts, strict=True):
        scores_BHNX = _scores(query_BHNC, keys_BGXC, mask_B1NX)
        largest.append(scores_BHNX.amax(-1, keepdim=True))
        shares_BHNX = (scores_BHNX - largest[-1]).exp()
        total.append(shares_BHNX.sum(-1, keepdim=True))
        output.append(_mixed(shares_BHNX, values_BGXC))
    largest_YBHN1, total_YBHN1, output_YBHNC = map(torch.stack, (largest, total, output))
    weight_YBHN1 = (largest_YBHN1 - largest_YBHN1.amax(0)).exp()
    return (weight_YBHN1 * output_YBHNC).sum(0) / (weight_YBHN1 * total_YBHN1).sum(0)


def _scores(query_BHNC: Tensor, keys_BGXC: Tensor, mask_B1NX: Tensor) -> Tensor:
    """The masked scores of some keys in fp64, ``[B, H, N, X]``: one product for each key head."""
    (B, H, N, C), (G, X) = query_BHNC.shape, keys_BGXC.shape[1:3]
    products = query_BHNC.reshape(B * G, H // G * N, C) @ keys_BGXC.double().flatten(0, 1).mT
    return products.view(B, H, N, X) + mask_B1NX.double()


def _mixed(shares_BHNX: Tensor, values_BGXC: Tensor) -> Tensor:
    """The values by their shares, in fp64: ``[B, H, N, C]``."""
    (B, H, N, X), (G, C) = shares_BHNX.shape, values_BGXC.shape[1::2]
    return (shares_BHNX.view(B * G, H // G * N, X) @ values_BGXC.double().flatten(0, 1)).view(B, H, N, C)


@contextmanager
def tree_attention() -> Iterator[None]:
    """Within this context, of this thread alone, transformers' SDPA attention of few queries is that of `attend` or `attend_exactly`."""
    if AttentionInterface()["sdpa"] is not _sdpa:
        AttentionInterface.register("sdpa", _sdpa)
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def _sdpa(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    """transformers' SDPA attention, outside the context unchanged."""
    plain = not any(options.get(name) is not None for name in ("position_bias", "softcap", "cache")) and not options.get("dropout")
    fits = attention_mask is not None and attention_mask.shape[1] == 1 and query.shape[2] <= MAX_QUERIES
    exactly = query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= MAX_EXACT
    as_operation = _is_one_operation(query)
    if not (_active.get() and plain and fits and (as_operation or exactly or query.shape[1] != key.shape[1])):
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return found
    assert attention_mask is not None
    compute = attend_exactly if exactly and not as_operation else attend
    return compute(query, key, value, attention_mask, options.get("scaling")).transpose(1, 2).contiguous(), None
