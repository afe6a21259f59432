"""The compiled kernel for attention of few queries: against sums in fp64, and bits that do not depend on the other queries and slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_compile import needs_a_compiler
from torch import Tensor, nn
from torch._inductor.cpu_vec_isa import pick_vec_isa

from headstart.heads.backbone import tree_attention
from headstart.heads.backbone.tree_attention import attend, attend_exactly
from headstart.inference.capture.capture import Captured, Capturer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def compiled(**options: Any) -> Captured:
    def function(held: None, *inputs: Tensor) -> Tensor:
        return attend(*inputs, **options)

    return Capturer("compile", torch.device("cpu")).capture(function, "attention", nn.Identity())


def inputs(dtype: torch.dtype, heads: tuple[int, int], queries: int, keys: int, widths: tuple[int, int], rows: int = 2) -> list[Tensor]:
    """Queries, keys, values and a mask that hides a third of the keys, but not the first."""
    (H, G), (C, D) = heads, widths
    hidden = torch.rand(rows, 1, queries, keys) < 1 / 3
    hidden[..., 0] = False
    shapes = ((rows, H, queries, C), (rows, G, keys, C), (rows, G, keys, D))
    return [*(torch.randn(shape).to(dtype) for shape in shapes), ~hidden]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


@needs_a_compiler
@torch.no_grad()
@pytest.mark.parametrize("dtype, heads, queries, keys, widths, boolean, options", [
    (BF16, (6, 2), 5, 192, (64, 64), False, {}),
    (FP32, (4, 4), 20, 37, (8, 8), True, {}),                      # more queries than one part has; the last block is not full
    (FP16, (4, 1), 3, 70, (80, 48), True, {"scale": 0.25}),        # values of another width; widths that are no whole vectors
])  # fmt: skip
def test_it_gives_what_sums_in_fp64_give(
    dtype: torch.dtype, heads: tuple[int, int], queries: int, keys: int, widths: tuple[int, int], boolean: bool, options: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *tensors, mask = inputs(dtype, heads, queries, keys, widths)
    expected = attend_exactly(*(one.double() for one in tensors), additive(mask, torch.float64), **options)
    if pick_vec_isa():
        monkeypatch.setattr(tree_attention, "attend_exactly", None)   # what runs without the kernel
    captured = compiled(**options)
    found = captured(None, *tensors, mask if boolean else additive(mask, dtype))
    assert captured.fallback is None and captured.captures_made == 1
    assert found.dtype == dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected.to(dtype))
    if dtype != FP32:
        assert (found != expected.to(dtype)).float().mean() < 0.01, "rounded once"


@needs_a_compiler
@torch.no_grad()
def test_a_query_has_the_same_bits_alone_and_among_others_wherever_its_keys_lie() -> None:
    query, keys, values, mask = inputs(BF16, (6, 2), 7, 128, (64, 64), rows=1)
    captured = compiled()
    together = captured(None, query, keys, values, mask)
    order = torch.randperm(128)
    elsewhere = captured(None, query, keys[:, :, order], values[:, :, order], mask[..., order])
    assert torch.equal(elsewhere, together)
    alone = [captured(None, query[:, :, [i]], keys, values, mask[:, :, [i]]) for i in range(7)]
    assert torch.equal(torch.cat(alone, 2), together)
    assert captured.fallback is None
