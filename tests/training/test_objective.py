"""The chunked objective against a naive one that holds everything, in float64; and its counts.

Shape suffixes: B batch, T positions, D width, V vocabulary, K depth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from by_the_book import MIXED_TERMS, WHOLE_TERMS
from every_head import every_head
from guess import TinyDrafter, V, batch, chunked, learned, naive, run, small_backbone
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.methods import build_drafter
from headstart.support.pytree import map_tensors
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


@pytest.mark.parametrize(("terms", "weights"), CASES, ids=str)
def test_the_sum_does_not_depend_on_how_documents_lie(backbone: Backbone, terms: dict[str, float], weights: Weights) -> None:
    """Each alone (as in accumulation, or in separate processes), padded to one length, or packed in a row."""
    torch.manual_seed(5)
    drafter, wanted = TinyDrafter(backbone, 3, None).double(), Objective(terms=terms, depth_weights=weights, chunk_size=5)
    lengths = [4, 9, 3, 12]
    alone = []
    for i, length in enumerate(lengths):
        features = backbone.read(torch.randint(0, V, (1, length)))
        loss_mask_BT = torch.arange(length)[None] % 4 != i
        alone.append(replace(features, loss_mask_BT=loss_mask_BT, document_BT=torch.zeros(1, length, dtype=torch.int64)))
    packed = Features(
        *(torch.cat([getattr(one, name) for one in alone], 1) for name in ("tokens_BT", "hidden_BTD")),
        loss_mask_BT=torch.cat([one.loss_mask_BT for one in alone if one.loss_mask_BT is not None], 1),
        document_BT=torch.repeat_interleave(torch.tensor(lengths))[None],
    )
    padded = map_tensors(lambda x: F.pad(x, (0, 0) * (x.ndim - 2) + (0, 13 - x.shape[1])), alone)
    there = torch.arange(13)[None] < torch.tensor(lengths)[:, None]
    whole = Features(*(torch.cat([getattr(one, name) for one in padded]) for name in ("tokens_BT", "hidden_BTD")))
    whole = replace(whole, loss_mask_BT=torch.cat([one.loss_mask_BT for one in padded]), document_BT=torch.where(there, 0, -1))
    parts = [run(chunked, wanted, backbone, drafter, features) for features in alone]
    right = [torch.stack(part).sum(0) for part in zip(*parts, strict=True)]
    for features in (packed, whole):
        for a, b in zip(right, run(chunked, wanted, backbone, drafter, features), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert learned(packed) == sum(map(learned, alone)) > 0


def test_gradients_are_right_by_finite_differences(backbone: Backbone) -> None:
    torch.manual_seed(3)
    drafter = TinyDrafter(backbone, 2, None).double()
    features = batch(backbone)
    wanted = Objective(terms={"kl": 0.5, "ce": 0.5}, depth_weights="geometric", chunk_size=5)  # other weights depend on the draft
    weight = drafter.head.weight

    def loss(values: Tensor) -> Tensor:
        return torch.func.functional_call(Module(drafter, wanted, backbone, features), {"drafter.head.weight": values})

    assert torch.autograd.gradcheck(loss, (weight.detach().clone().requires_grad_(),), fast_mode=True)


class Module(nn.Module):
    """The objective as a function of the drafter's weights."""

    def __init__(self, drafter: Drafter, wanted: Objective, backbone: Backbone, features: Features) -> None:
        super().__init__()
        self.drafter, self.rest = drafter, (wanted, backbone, features)

    def forward(self) -> Tensor:
        wanted, backbone, features = self.rest
        return objective(FusedLoss(wanted, self.drafter), features, self.drafter(features)).loss


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


def test_a_perfect_draft_has_no_divergence_left(backbone: Backbone) -> None:
    """Alignment: a drafter that returns the backbone's own state of position t+1+k is always right, at every depth."""

    class Oracle(TinyDrafter):
        def forward_dense(self, features: Features) -> list[Tensor]:
            return [features.hidden_BTD[:, 1 + k : -1] for k in range(self.trained_depth)]

        def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
            return backbone.readout(hidden)

    features = batch(backbone)
    drafter = Oracle(backbone, 3, None)
    sums = objective(FusedLoss(Objective(), drafter), features, drafter(features))
    torch.testing.assert_close(sums.loss, torch.zeros_like(sums.loss), atol=1e-9, rtol=0)
    assert torch.equal(sums.correct_K, sums.count_K)
    torch.testing.assert_close(sums.alpha_K, sums.count_K.double())


def test_the_dtype_of_the_softmax_is_at_least_fp32(backbone: Backbone) -> None:
    drafter = TinyDrafter(backbone, 1, None).bfloat16()
    features = batch(backbone)
    hidden = [h.bfloat16() for h in TinyDrafter(backbone, 1, None).double()(features)]
    assert objective(FusedLoss(Objective(), drafter), features, hidden).alpha_K.dtype == torch.float64  # the teacher's
    assert F.log_softmax(torch.zeros(2, dtype=torch.bfloat16), -1).dtype == torch.bfloat16  # without an explicit dtype
