"""A folded trace returns the same results for other sizes too, without the shape arithmetic."""

from __future__ import annotations

from typing import Any

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
