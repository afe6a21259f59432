"""A folded trace returns the same results for other sizes too, without the shape arithmetic."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from families import prompts, tiny
from torch import Tensor
from transformers.integrations import sdpa_attention

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.hooks import GROUPED
from headstart.inference.capture.folding import expected_warnings, fold


def halves(store: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Like rotary embeddings and caches: halves of a size, a size from another tensor, in-place writes, repeated expressions."""
    half = x.shape[-1] // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], -1).view(x.shape[0], -1)
    store[:, : rotated.shape[1]] += 1
    store[:, : rotated.shape[1]] += 1
    return rotated * x.shape[1], store.clone()


def traced(*example: Tensor) -> Any:
    with expected_warnings():
        return torch.jit.trace(halves, example, check_trace=False)


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
    count = {name: sum(1 for node in graph.nodes()) for name, graph in (("before", before.graph), ("after", after.graph))}
    assert "aten::floor_divide" in str(before.graph) and "aten::floor_divide" not in str(after.graph)
    assert count["after"] < 0.7 * count["before"]


def test_keys_that_heads_share_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    on = Backbone(tiny("llama"))
    assert on.config.num_key_value_heads < on.config.num_attention_heads
    (ids,), attention_mask = prompts((9,)), torch.ones(1, 9, 9, dtype=torch.bool).tril()
    expected = on.read(ids[None]).hidden_BTD
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *args: pytest.fail("repeated"))
    assert torch.allclose(on.read(ids[None], None, None, {"full_attention": attention_mask}).hidden_BTD, expected, atol=1e-5)
    assert GROUPED not in os.environ
    monkeypatch.setenv(GROUPED, "0")   # a user's own setting is kept
    with pytest.raises(pytest.fail.Exception, match="repeated"):
        on.read(ids[None], None, None, {"full_attention": attention_mask})
    assert os.environ[GROUPED] == "0"
