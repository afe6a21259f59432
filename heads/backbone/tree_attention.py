"""Attention of few queries beside a mask, those of a plain decoding step or of a tree's nodes, and experts of few tokens.

*Grouped-query heads.* transformers repeats keys and values for every query head whenever there is a mask and more than one query: on an
H100, 0.7 ms of a 9.5 ms forward pass of an 8B model with room for 1,024 positions, and more with longer contexts. Here they are shared.

*The same bits on a CPU.* A sum's rounding depends on how many queries there are and on where a node's ancestors lie among the keys, so
a node of a tree would differ from the plain step that writes the same token. Summed in fp64 and rounded once, they are equal: in 16 bits
always; in fp32 one number in 10^8 could still round the other way where the sums in fp64 differ in their last bit. So there the products
have shapes at which MKL adds up each number by itself, in the order of the keys, where a masked key adds nothing (`_sums`).

Shape suffixes: B batch, H query heads, G key heads, R query heads of a key head, N queries, M queries of a key head, S keys, X
keys of a block, Y blocks, C head width.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headstart.support.devices import holding, is_accelerator

EXACT_FROM = 256
"""Width of a model from which a token's pass in fp32 on a CPU has the same bits among any number of tokens. In smaller ones that would take
up to half of the pass."""
MAX_QUERIES = 256
"""With more queries, the keys are few beside them."""
MAX_EXACT = 64
"""Queries that are summed in fp64, which takes twice as long as in 16 bits: more than a tree on a CPU has, fewer than a prompt has."""
LONG = 1024
"""From so many keys on, fp64 copies of them are made in blocks, twice as many at every doubling, so that they stay in the CPU's caches."""
BLOCK_ROWS = 8
"""Rows whose fp64 copies are made at a time: 64 rows of 192 keys then take 0.4 of the time, of 512 keys 0.2 (paired, one thread)."""
FEW_ROWS = 2
"""Up to so many rows of one block of keys, torch's kernel is the fastest in fp64."""
QUERIES, KEYS, ONES = 4, 24, 8
"""Multiples of queries, keys and further values at which MKL's products in fp64 give each number by itself the same bits."""
_active: ContextVar[bool] = ContextVar("tree attention", default=False)
_exactly: ContextVar[bool | None] = ContextVar("exact tree attention, None outside the context", default=None)
_one_operation: ContextVar[bool] = ContextVar("attention as one operation", default=False)
_equal: ContextVar[bool] = ContextVar("equal queries", default=False)


def attend(query_BHNC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, mask_B1NS: Tensor, scale: float | None = None) -> Tensor:
    """Return the attention output ``[B, H, N, C]``; ``mask_B1NS`` is boolean or additive, ``scale`` defaults to that of SDPA.

    On a CPU torch's kernel groups the heads; for a single query in bf16 it takes two to four times as long as in fp32 (LOG.md). On an
    accelerator its fast kernels do not group them, beside a mask, so the query heads of one key head become further queries.
    """
    if _is_one_operation(query_BHNC):
        scale = query_BHNC.shape[-1] ** -0.5 if scale is None else scale
        return cast(Tensor, few_queries(query_BHNC, keys_BGSC, values_BGSC, mask_B1NS, scale)).transpose(1, 2)
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
    return output_BGMC.reshape(B, H, N, values_BGSC.shape[-1])  # kernels return their results in memory orders of their own


def attend_exactly(query_BHNC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, mask_B1NS: Tensor, scale: float | None = None) -> Tensor:
    """The same with sums in fp64, rounded once to the query's dtype; ``mask_B1NS`` is additive and finite.

    In fp64 torch's kernel multiplies for every query head by itself: it has the fewest operations for a row or two of few keys in 16 bits,
    and for more rows is slower than one product for each key head (LOG.md).
    """
    slots = int(keys_BGSC.shape[2])  # a captured pass keeps the number of blocks, and is captured anew at every doubling from `LONG` on
    blocks, dtype = 1 << (slots // LONG).bit_length(), query_BHNC.dtype
    if blocks == 1 and query_BHNC.shape[0] <= FEW_ROWS and dtype != torch.float32:
        return attend(query_BHNC.double(), keys_BGSC.double(), values_BGSC.double(), mask_B1NS.double(), scale).to(dtype)
    scale = query_BHNC.shape[-1] ** -0.5 if scale is None else scale
    parts = [tensor.tensor_split(blocks, dim) for tensor, dim in ((keys_BGSC, 2), (values_BGSC, 2), (mask_B1NS, 3))]
    largest, sums = zip(*[_sums(query_BHNC, k, v, mask, scale) for k, v, mask in zip(*parts, strict=True)], strict=True)
    sums_BHNC = sums[0]
    if blocks > 1:
        largest_YBHN1 = torch.stack(largest)
        sums_BHNC = ((largest_YBHN1 - largest_YBHN1.amax(0)).exp() * torch.stack(sums)).sum(0)
    return (sums_BHNC[..., :-ONES] / sums_BHNC[..., -1:]).to(dtype)


def _sums(query_BHNC: Tensor, keys_BGXC: Tensor, values_BGXC: Tensor, mask_B1NX: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Each query's largest score ``[B, H, N, 1]``, and its sums of values by their shares, of the shares last: ``[B, H, N, C + ONES]``.

    All in fp64, with one product for each key head. What is computed beside them, to multiples of `QUERIES` and `KEYS`, is cut off.
    """
    (H, C), (G, D), (B, _, N, X) = map(int, query_BHNC.shape[1::2]), map(int, values_BGXC.shape[1::2]), mask_B1NX.shape
    M = H // G * N
    whole = M + -M % QUERIES
    query_BMC = query_BHNC.new_zeros(B * G, whole, C, dtype=torch.float64)
    query_BMC[:, :M] = query_BHNC.reshape(B * G, M, C)
    keys_BXC = query_BMC.new_zeros(B * G, X + -X % KEYS, C)  # zeros: gradients multiply what is cut off, too
    keys_BXC[:, :X] = keys_BGXC.reshape(B * G, X, C)
    values_BXC = query_BMC.new_ones(B * G, X, D + ONES)
    values_BXC[..., :D] = values_BGXC.reshape(B * G, X, D)
    scores_BHNX = (query_BMC.mul_(scale) @ keys_BXC.mT)[:, :M, :X].reshape(B, H, N, X) + mask_B1NX
    largest_BHN1 = scores_BHNX.amax(-1, keepdim=True)
    shares_BMX = query_BMC.new_zeros(B * G, whole, X)
    shares_BMX[:, :M] = (scores_BHNX - largest_BHN1).exp_().view(B * G, M, X)
    return largest_BHN1, (shares_BMX @ values_BXC)[:, :M].reshape(B, H, N, D + ONES)


def in_blocks_of_rows(query_BHNC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, mask_B1NS: Tensor, scale: float | None) -> Tensor:
    """`attend_exactly` for some rows after others, whose copies stay in the CPU's caches; a captured pass keeps the number of blocks."""
    rows = query_BHNC.shape[0]
    blocks = 1 + (int(rows) - 1) // BLOCK_ROWS
    if blocks == 1:
        return attend_exactly(query_BHNC, keys_BGSC, values_BGSC, mask_B1NS, scale)
    mask_B1NS = mask_B1NS.expand(rows, -1, -1, -1)
    parts = zip(*(tensor.tensor_split(blocks) for tensor in (query_BHNC, keys_BGSC, values_BGSC, mask_B1NS)), strict=True)
    return torch.cat([attend_exactly(query, keys, values, mask, scale) for query, keys, values, mask in parts])


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


def _is_one_operation(query_BHNC: Tensor) -> bool:
    return _one_operation.get() and query_BHNC.dtype != torch.float64 and bool(query_BHNC.shape[2] <= MAX_EXACT)


def attention_as_one_operation() -> AbstractContextManager[None]:
    """Within this context, of this thread alone, attention of few queries is `few_queries`: for what is traced for a compiler on a CPU."""
    return holding(_one_operation, True)


def equal_queries() -> AbstractContextManager[None]:
    """Within this context, of this thread alone, all queries of a row are equal, so attention is computed for the first."""
    return holding(_equal, True)


@contextmanager
def tree_attention(exactly: bool = True, trees: bool = True) -> Iterator[None]:
    """Within this context, of this thread alone, transformers' SDPA attention of few queries is that of `attend` or `attend_exactly`.

    That of many, and without ``trees`` all, is its own, with values as wide as keys on a CPU: else torch holds the scores of all pairs.
    """
    if AttentionInterface()["sdpa"] is not _sdpa:
        AttentionInterface.register("sdpa", _sdpa)
    with holding(_active, trees), holding(_exactly, exactly):
        yield


def _sdpa(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any) -> tuple[Tensor, None]:
    """transformers' SDPA attention, outside the context unchanged."""
    plain = not any(options.get(name) is not None for name in ("position_bias", "softcap", "cache")) and not options.get("dropout")
    fits = attention_mask is not None and attention_mask.shape[1] == 1 and query.shape[2] <= MAX_QUERIES
    exactly = _exactly.get() and query.device.type == "cpu" and query.dtype != torch.float64 and query.shape[2] <= MAX_EXACT
    as_operation = _is_one_operation(query)
    if not (_active.get() and plain and fits and (as_operation or exactly or query.shape[1] != key.shape[1])):
        lacking = key.shape[-1] - value.shape[-1] if _exactly.get() is not None and query.device.type == "cpu" else 0
        padded = pad(value, (0, lacking)) if lacking > 0 else value
        return sdpa_attention_forward(module, query, key, padded, attention_mask, **options)[0][..., : value.shape[-1]], None
    assert attention_mask is not None
    compute, queries = in_blocks_of_rows if exactly and not as_operation else attend, query.shape[2]
    if _equal.get():
        query, attention_mask = query[:, :, :1], attention_mask[:, :, :1]
    output_BNHC = compute(query, key, value, attention_mask, options.get("scaling")).transpose(1, 2)
    return output_BNHC.expand(-1, queries, -1, -1).contiguous(), None


# Layers of experts. One may get one token of a tree, and the same token with others in another pass. A single row is added up in another
# order than several (`headstart.inference.capture.onednn`), and so are few rows by MKL in fp32: fewer than 4 on an AMD EPYC, fewer than 16
# on an Intel Xeon. So every token is given several times, and the first result of each is kept: an expert's weights are read once for all.

TIMES, TIMES_FP32 = 2, (4, 8, 16)
"""How often a token is given to its experts; in fp32 the first that is enough here."""
_repeating: ContextVar[bool] = ContextVar("repeated tokens", default=False)


def repeated_tokens() -> AbstractContextManager[None]:
    """Within this context, of this thread alone, experts get every token several times."""
    for name in ("eager", *ALL_EXPERTS_FUNCTIONS):
        own = ALL_EXPERTS_FUNCTIONS.get(name)
        if getattr(own, "func", None) is not _repeated:
            ALL_EXPERTS_FUNCTIONS.register(name, partial(_repeated, own))
    return holding(_repeating, True)


@cache
def times_in_fp32() -> int:
    """The number of rows from which on MKL adds up the products of each in one order."""
    x, weight = torch.randn(64 + 256, 1536, generator=torch.Generator().manual_seed(0)).split([64, 256])
    many = x @ weight.T
    return next((times for times in TIMES_FP32 if torch.equal(x[:times] @ weight.T, many[:times])), TIMES_FP32[-1])


def _repeated(own: Callable[..., Tensor] | None, experts: Any, hidden: Tensor, *rest: Any, **named: Any) -> Tensor:
    """The experts' function, outside the context unchanged. ``own`` None: their class's forward, which transformers wraps."""
    run = type(experts).forward.__wrapped__ if own is None else own
    if not _repeating.get() or hidden.device.type != "cpu":
        result: Tensor = run(experts, hidden, *rest, **named)
        return result
    times = times_in_fp32() if hidden.dtype == torch.float32 else TIMES
    repeat = partial(torch.repeat_interleave, repeats=times, dim=0)
    found: Tensor = run(experts, repeat(hidden), *map(repeat, rest), **{name: repeat(tensor) for name, tensor in named.items()})
    return found[::times]


def additive_mask(allowed_BTS: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a mask of allowed positions, ``[B, T, S]``, into what is added to the scores, ``[B, 1, T, S]``."""
    mask_BTS = torch.zeros(allowed_BTS.shape, dtype=dtype, device=allowed_BTS.device)
    return mask_BTS.masked_fill_(~allowed_BTS, torch.finfo(dtype).min)[:, None]
