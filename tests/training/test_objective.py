"""The chunked objective against a naive one that holds everything, in float64; and its counts.

Shape suffixes: B batch, T positions, K depth.
"""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from by_the_book import MIXED_TERMS, WHOLE_TERMS
from every_head import every_head
from guess import TinyDrafter, V, batch, chunked, learned, naive, run, small_backbone
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.methods import build_drafter
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.objective import objective
from headstart.training.recipe.recipe import Objective


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return small_backbone()


Weights = Literal["geometric", "expected"]
CASES = [(terms, "geometric") for terms in [*WHOLE_TERMS, *MIXED_TERMS]] + [(terms, "expected") for terms in ({"ce": 1.0}, {"lk": 1.0})]


@pytest.mark.parametrize("vocabulary", [None, torch.arange(1, V, 2)], ids=["whole", "draft"])
@pytest.mark.parametrize(("terms", "weights"), CASES, ids=str)
def test_same_as_naive_forward_and_backward(
    backbone: Backbone, terms: dict[str, float], vocabulary: Tensor | None, weights: Weights
) -> None:
    torch.manual_seed(2)
    drafter = TinyDrafter(backbone, 3, vocabulary).double()
    features = batch(backbone)
    wanted = Objective(terms=terms, depth_decay=0.6, depth_weights=weights, top_k=4)
    right = run(naive, wanted, backbone, drafter, features)
    for chunk in (7, 10_000):
        actual = run(chunked, wanted.model_copy(update={"chunk_size": chunk}), backbone, drafter, features)
        assert len(actual) == len(right)
        for a, b in zip(right, actual, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert right[1][0] == learned(features) > 0


def test_a_batch_without_label_tokens_still_reaches_every_parameter(backbone: Backbone) -> None:
    """Data parallelism waits for the gradient of every parameter, even from a process without label tokens."""
    drafter = TinyDrafter(backbone, 3, None).double()
    for length in (1, 2, 4, 6):
        drafter.zero_grad()
        zeros = torch.zeros(1, length, dtype=torch.int64)
        features = replace(backbone.read(zeros), loss_mask_BT=zeros.bool(), document_BT=zeros)
        sums = objective(FusedLoss(Objective(terms={"kl": 1.0, "ce": 1.0}), drafter), features, drafter(features))
        sums.loss.backward()
        assert sums.loss == 0 and not sums.count_K.any()
        assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


SHIPPED = [*every_head(2), ("eagle3", {"depth": 2, "draft_vocab_size": 20})]


@pytest.mark.parametrize(("kind", "arguments"), SHIPPED)
def test_shipped_heads_same_as_naive(backbone: Backbone, kind: str, arguments: dict[str, Any]) -> None:
    torch.manual_seed(4)
    drafter = build_drafter(kind, backbone, arguments).double()
    features = batch(backbone)
    features = replace(
        backbone.read(features.tokens_BT, taps=drafter.taps), loss_mask_BT=features.loss_mask_BT, document_BT=features.document_BT
    )
    wanted = Objective(terms={"kl": 0.5, "ce": 0.5}, chunk_size=6)
    fast = objective(FusedLoss(wanted, drafter), features, drafter(features))
    slow = naive(wanted, backbone, drafter, features, drafter(features))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-10, atol=1e-10)
