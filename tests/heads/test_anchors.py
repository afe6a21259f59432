"""Training at sampled anchors: the dense loss in expectation, and exactly at a share of 1; independent of how a step is split.

Shape suffixes: M anchors, K depth.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import families
import pytest
import torch
from guess import MIXED_TERMS, TinyDrafter, V, batch, run, small_backbone
from test_objective import Feature
from torch import Tensor

from headstart import Backbone, Drafter, Features
from headstart.heads.methods import build_drafter
from headstart.training.data.batches import collate
from headstart.training.data.data import Sample
from headstart.training.features.source import LiveFeatures
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import StepKey, sample_anchors
from headstart.training.objective.objective import Sums, TrainStep, objective
from headstart.training.recipe.recipe import Objective

LENGTHS, ROWS = (9, 4, 13, 6, 21, 5, 8), [[0, 1, 2], [3, 4], [5, 6]]
KEY = StepKey(seed=3, step=5)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return small_backbone()


def at_anchors(share: float, key: StepKey = KEY) -> Callable[..., Sums]:
    """The objective at anchors, with the signature of `naive`; the drafter drafts again at the anchors alone."""

    def anchored(settings: Objective, backbone: Backbone, drafter: Drafter, features: Features, dense: list[Tensor]) -> Sums:
        anchors = sample_anchors(features, drafter.trained_depth, share, key)
        return objective(FusedLoss(settings, drafter), features, drafter(features, anchors.at), anchors)

    return anchored


def dense(settings: Objective, backbone: Backbone, drafter: Drafter, features: Features, hidden: list[Tensor]) -> Sums:
    return objective(FusedLoss(settings, drafter), features, hidden)


@pytest.mark.parametrize("vocabulary", [None, torch.arange(1, V, 2)], ids=["whole", "draft"])
@pytest.mark.parametrize("weights", ["geometric", "expected"])
@pytest.mark.parametrize("terms", [{"kl": 1.0}, MIXED_TERMS[0], {"features": 1.0, "kl": 0.1}], ids=str)
def test_all_positions_as_anchors_are_the_dense_loss(
    backbone: Backbone, terms: dict[str, float], weights: Literal["geometric", "expected"], vocabulary: Tensor | None
) -> None:
    torch.manual_seed(2)
    kind = Feature if "features" in terms else TinyDrafter
    drafter, features = kind(backbone, 3, vocabulary).double(), batch(backbone)
    settings = Objective(terms=terms, depth_weights=weights, depth_decay=0.6, chunk_size=7)
    expected, actual = (run(way, settings, backbone, drafter, features) for way in (dense, at_anchors(1.0)))
    assert expected[0] > 0 and len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("weights", ["geometric", "expected"])
def test_the_expected_loss_does_not_depend_on_the_share(backbone: Backbone, weights: Literal["geometric", "expected"]) -> None:
    torch.manual_seed(2)
    drafter, features = TinyDrafter(backbone, 3, None).double(), batch(backbone)
    settings = Objective(depth_weights=weights)
    with torch.no_grad():
        hidden = drafter(features)
        whole = dense(settings, backbone, drafter, features, hidden)
        some = [at_anchors(0.3, StepKey(0, step))(settings, backbone, drafter, features, hidden) for step in range(200)]
    assert torch.stack([sums.loss for sums in some]).mean() == pytest.approx(whole.loss.item(), rel=0.05)
    counts_K = torch.stack([sums.count_K for sums in some]).double().mean(0)
    torch.testing.assert_close(counts_K, 0.3 * whole.count_K.double(), rtol=0.1, atol=0)
    alpha_K = torch.stack([sums.alpha_K for sums in some]).mean(0) / counts_K  # measured on the sample
    torch.testing.assert_close(alpha_K, whole.alpha_K / whole.count_K, rtol=0.05, atol=0)


def block_head(backbone: Backbone) -> Drafter:
    torch.manual_seed(4)
    return build_drafter("tests.helpers.block_head", backbone, {}).double()


@pytest.mark.parametrize("weights", ["geometric", "expected"])
def test_a_step_drafts_from_anchors_alone_wherever_documents_lie(backbone: Backbone, weights: Literal["geometric", "expected"]) -> None:
    generator = torch.Generator().manual_seed(0)
    masks = [torch.rand(length, generator=generator) < 0.8 for length in LENGTHS]
    samples = [Sample(torch.randint(1, V, (len(mask),), generator=generator), mask) for mask in masks]
    drafter, drafted = block_head(backbone), []
    step = TrainStep(drafter, Objective(depth_weights=weights, chunk_size=7))
    drafter.register_forward_hook(lambda module, args, output: drafted.append((len(args[1].row_M), len(output[0]))))
    alone = [[i] for i in range(len(LENGTHS))]
    results = []
    for cut in ([ROWS], [alone], [[row] for row in ROWS], [[row] for row in reversed(alone)]):
        drafter.zero_grad()
        parts = [step(LiveFeatures(backbone, ()).read(collate(samples, rows)), KEY) for rows in cut]
        sum(part.loss for part in parts).backward()
        sums = [torch.stack(part).sum(0).detach().double() for part in zip(*parts, strict=True)]
        results.append([*sums, *(weight.grad.clone() for weight in drafter.parameters() if weight.grad is not None)])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    label_tokens = sum(int(mask[2:].sum()) for mask in masks)
    anchors = [sum(count for count, _ in drafted[start:end]) for start, end in ((0, 1), (1, 2), (2, 5), (5, 12))]
    assert len(set(anchors)) == 1 and 0 < anchors[0] < 0.7 * label_tokens and all(count == rows for count, rows in drafted)
    assert len(results[0]) == len(Sums._fields) + len(list(drafter.parameters())) and results[0][0] > 0


def test_a_batch_without_anchors_still_reaches_every_parameter(backbone: Backbone) -> None:
    drafter = block_head(backbone)
    zeros = torch.zeros(1, 6, dtype=torch.int64)
    features = replace(backbone.read(zeros), loss_mask_BT=zeros.bool(), document_BT=zeros)
    sums = TrainStep(drafter, Objective())(features, KEY)
    sums.loss.backward()
    assert sums.loss == 0 and not sums.count_K.any()
    assert all(weight.grad is not None and not weight.grad.any() for weight in drafter.parameters())


@pytest.mark.parametrize("options", [{}, {"layers": 2}, {"sliding_window": 5}], ids=str)
def test_depths_after_the_first_at_anchors_alone(options: dict[str, Any]) -> None:
    """Hidden states are those of drafts at all positions; several documents in a row."""
    on = families.backbone("llama")
    drafter = families.random_drafter("eagle3", on, depth=4, **options)
    samples = [Sample(families.texts(1, length, seed=length)[0], torch.ones(length, dtype=torch.bool)) for length in LENGTHS]
    features = LiveFeatures(on, drafter.taps).read(collate(samples, ROWS))
    deeper = sample_anchors(features, 4, 0.4, KEY, first_depth=1)
    at = deeper.at.ascending()
    dense, sparse = drafter.forward_dense(features), drafter.forward_deeper(features, at)
    torch.testing.assert_close(sparse[0], dense[0])
    assert 0 < len(at.row_M) < features.tokens_BT.numel() / 2
    drawn = [sorted(zip(one.row_M.tolist(), one.position_M.tolist(), strict=True)) for one in (at, deeper.at)]
    assert drawn[0] == drawn[1] == list(zip(at.row_M.tolist(), at.position_M.tolist(), strict=True))
    for k in range(1, 4):
        inside_M = at.position_M < dense[k].shape[1]
        row_M, place_M = at.row_M[inside_M], at.position_M[inside_M]
        torch.testing.assert_close(sparse[k][inside_M], dense[k][row_M, place_M], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", ["geometric", "expected"])
def test_the_deeper_share_keeps_depth_0_and_the_expected_loss(backbone: Backbone, weights: Literal["geometric", "expected"]) -> None:
    torch.manual_seed(2)
    drafter, features = TinyDrafter(backbone, 3, torch.arange(1, V, 2)).double(), batch(backbone)
    settings = Objective(depth_weights=weights, chunk_size=7)
    whole = TrainStep(drafter, settings)(features, KEY)
    drafter.deeper_share = 0.3
    with torch.no_grad():
        some = [TrainStep(drafter, settings)(features, StepKey(0, step)) for step in range(200)]
    assert all(torch.equal(sums.count_K[0], whole.count_K[0]) and sums.alpha_K[0] == whole.alpha_K[0] for sums in some)
    counts_K = torch.stack([sums.count_K for sums in some]).double().mean(0)
    torch.testing.assert_close(counts_K[1:], 0.3 * whole.count_K[1:].double(), rtol=0.1, atol=0)
    torch.testing.assert_close(torch.stack([sums.loss for sums in some]).mean(), whole.loss.detach(), rtol=0.05, atol=0)
    drafter.deeper_share = 1 - 1e-12  # every position is drawn, on the path of those that are not
    again = TrainStep(drafter, settings)(features, KEY)
    gradients = [torch.autograd.grad(sums.loss, list(drafter.parameters())) for sums in (whole, again)]
    for a, b in zip((*again[:4], *gradients[1]), (*whole[:4], *gradients[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
