"""A folded trace returns the same results for other sizes too, without the shape arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from headstart.inference.capture.folding import fold, trace


def halves(store: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Like rotary embeddings and caches: halves of a size, a size from another tensor, in-place writes, repeated expressions."""
    half = x.shape[-1] // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], -1).view(x.shape[0], -1)
    store[:, : rotated.shape[1]] += 1
    store[:, : rotated.shape[1]] += 1
    return rotated * x.shape[1], store.clone()


def traced(*example: Tensor) -> Any:
    return trace(halves, example)


def test_a_folded_trace_follows_sizes_and_writes_in_place() -> None:
    folded = fold(traced(torch.zeros(2, 64), torch.randn(2, 3, 8)))
    for rows, count, width in ((2, 3, 8), (5, 2, 12), (1, 4, 2)):
        x, store, folded_store = torch.randn(rows, count, width), torch.zeros(rows, 64), torch.zeros(rows, 64)
        for one, other in zip(folded(folded_store, x), halves(store, x), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(folded_store, store) and folded_store.max() == 2


def test_sizes_are_no_tensors_any_more() -> None:
    before = traced(torch.zeros(2, 64), torch.randn(2, 3, 8))
    after = fold(before)
    count = {name: sum(1 for node in graph.nodes()) for name, graph in (("before", before), ("after", after.graph))}
    assert "aten::floor_divide" in str(before) and "aten::floor_divide" not in str(after.graph)
    assert count["after"] < 0.7 * count["before"]


def test_conversions_to_the_same_dtype_are_dropped_and_equal_operations_merged() -> None:
    def normed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, other = (rms_norm(x.to(torch.float32), (8,)) for _ in range(2))
        return one + other, x.to(torch.float64), x.to(torch.float32, copy=True)

    x = torch.randn(3, 8)
    folded, expected = fold(trace(normed, (x,))), normed(x)
    kinds = [node.kind() for node in folded.graph.nodes()]
    assert kinds.count("aten::rms_norm") == 1 and kinds.count("aten::to") == 2
    results = folded(x)
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert results[2].data_ptr() != x.data_ptr(), "a copy that was asked for"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norms_are_computed_as_layer_norms(dtype: torch.dtype) -> None:
    """Those with constant weights over the last dimension; the results are those of the norm, contiguous as its own."""
    torch.manual_seed(0)
    weight_D, weight_TD = torch.rand(48, dtype=dtype) + 0.5, torch.ones(3, 48, dtype=dtype)

    def norms(x: Tensor, scale_D: Tensor) -> tuple[Tensor, ...]:
        return rms_norm(x, (48,), weight_D, 1e-6), rms_norm(x, (48,), scale_D, 1e-6), rms_norm(x, (3, 48), weight_TD, 1e-6)

    x, scale_D = torch.randn(2, 3, 48).to(dtype), torch.rand(48, dtype=dtype)
    folded = fold(trace(norms, (x, scale_D)))
    kinds = [node.kind() for node in folded.graph.nodes()]
    assert kinds.count("aten::layer_norm") == 1 and kinds.count("aten::rms_norm") == 2
    for scale in (1.0, 1e-3, 1e4):
        rows = torch.cat([x, x, x]) * scale + (torch.arange(48) == 5) * 300 * scale  # as outliers of hidden states
        rows = rows.to(dtype)
        first, *others = folded(rows, scale_D)
        expected, *unchanged = norms(rows, scale_D)
        assert first.is_contiguous()
        torch.testing.assert_close(first, expected, rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        assert all(map(torch.equal, others, unchanged))
