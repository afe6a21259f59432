"""The chunked objective against a naive one that holds everything, in float64; its counts; and the limits of its terms.

Shape suffixes: B batch, T positions, K depth, C positions of a chunk, V draft vocabulary.
"""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from families import every_head
from guess import MIXED_TERMS, WHOLE_TERMS, Largest, TinyDrafter, V, batch, chunked, learned, naive, run, small_backbone
from torch import Tensor

from headstart import Backbone, Drafter, Features
from headstart.heads.methods import build_drafter
from headstart.support.errors import UserError
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.objective import Sums, objective, require_comparable
from headstart.training.objective.terms import FEATURES, TERMS, compare, gradient, known_target, mix, soft_target
from headstart.training.recipe import training as recipe
from headstart.training.recipe.recipe import Objective


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return small_backbone()


Weights = Literal["geometric", "expected"]
CASES = [(terms, "geometric") for terms in [*WHOLE_TERMS, *MIXED_TERMS]] + [(terms, "expected") for terms in ({"ce": 1.0}, {"lk": 1.0})]


@pytest.mark.parametrize("vocabulary", [None, torch.arange(1, V, 2)], ids=["whole", "draft"])
@pytest.mark.parametrize(("terms", "weights"), CASES, ids=str)
def test_as_naive_forward_and_backward(backbone: Backbone, terms: dict[str, float], vocabulary: Tensor | None, weights: Weights) -> None:
    torch.manual_seed(2)
    drafter = TinyDrafter(backbone, 3, vocabulary).double()
    features = batch(backbone)
    wanted = Objective(terms=terms, depth_decay=0.6, depth_weights=weights, top_k=4, lk_eta=2.0)
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


# How the objective is computed: in chunks, each readout once, in which dtypes; and feature regression with or without a divergence.


def test_logits_are_never_held_whole(backbone: Backbone) -> None:
    """No readout covers more positions than a chunk; each runs once, the backbone's not once per depth; none runs in the backward pass."""
    drafter = TinyDrafter(backbone, 3, None).double()
    features = batch(backbone)
    seen: list[int] = []
    hook = backbone.unembed.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    sums = objective(FusedLoss(Objective(chunk_size=4), drafter), features, drafter(features))
    assert drafter.largest == max(seen) == 4 and sum(seen) == learned(features)
    sums.loss.backward()
    assert sum(seen) == learned(features)
    hook.remove()


@pytest.mark.parametrize("terms", [*WHOLE_TERMS, MIXED_TERMS[1]], ids=str)
def test_no_tensor_of_all_positions_and_the_vocabulary_exists(backbone: Backbone, terms: dict[str, float]) -> None:
    drafter, features = TinyDrafter(backbone, 3, None).double(), batch(backbone)
    sizes = []
    for chunk in (4, 1000):
        wanted, hidden = Objective(terms=terms, depth_weights="expected", chunk_size=chunk), drafter(features)
        with Largest() as largest:
            objective(FusedLoss(wanted, drafter), features, hidden).loss.backward()
        sizes.append(largest.numbers)
    assert sizes == [backbone.unembed.weight.numel(), learned(features) * V] and sizes[0] < sizes[1]  # the largest weight


def test_without_autograd_the_numbers_are_the_same(backbone: Backbone) -> None:
    drafter, features = TinyDrafter(backbone, 3, None).double(), batch(backbone)
    sums = objective(FusedLoss(Objective(), drafter), features, drafter(features))
    with torch.no_grad():
        for a, b in zip(sums, objective(FusedLoss(Objective(), drafter), features, drafter(features)), strict=True):
            assert not b.requires_grad and torch.equal(a, b)


def test_a_frozen_readout_gets_no_gradient_and_a_frozen_body_lets_the_readout_learn(backbone: Backbone) -> None:
    features = batch(backbone)
    right = run(chunked, Objective(), backbone, drafter := TinyDrafter(backbone, 3, None).double(), features)
    grads = dict(zip([name for name, _ in drafter.named_parameters()], right[len(Sums._fields) :], strict=True))
    for frozen in (drafter.head, drafter.mix):
        drafter.requires_grad_(True)
        frozen.requires_grad_(False)
        drafter.zero_grad()
        objective(FusedLoss(Objective(), drafter), features, drafter(features)).loss.backward()
        for name, parameter in drafter.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, grads[name])


class Feature(TinyDrafter):
    """Like EAGLE-1: its states stand in for the backbone's and are read out by the backbone's output layer."""

    def __init__(self, backbone: Backbone, depth: int = 3, vocabulary: Tensor | None = None) -> None:
        super().__init__(backbone, depth, vocabulary)
        self.mix = torch.nn.ModuleList(torch.nn.Linear(backbone.dim, backbone.dim) for _ in range(depth))
        del self.head, self.correction

    own_readout = False

    def forward_dense(self, features: Features) -> list[Tensor]:
        return [3 * drafted_BTD for drafted_BTD in super().forward_dense(features)]  # both sides of the bend of smooth L1

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        logits = self.backbone.readout(hidden)
        return logits if self.vocabulary is None else logits[..., self.vocabulary]


@pytest.mark.parametrize("vocabulary", [None, torch.arange(1, 53, 2)], ids=["whole", "draft"])
@pytest.mark.parametrize("terms", [{"features": 1.0}, {"features": 1.0, "kl": 0.1}], ids=str)
def test_regression_with_a_divergence_same_as_naive(backbone: Backbone, terms: dict[str, float], vocabulary: Tensor | None) -> None:
    torch.manual_seed(2)
    drafter, features = Feature(backbone, 3, vocabulary).double(), batch(backbone)
    wanted = Objective(terms=terms, chunk_size=7)
    results = [run(way, wanted, backbone, drafter, features) for way in (naive, chunked)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


class Wrapped(Feature):
    """Has the backbone's width and a readout of its own that happens to equal the backbone's."""

    own_readout = True

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.own = torch.nn.Parameter(backbone.unembed.weight.clone())

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return hidden @ self.own.T


def test_only_states_that_the_backbone_reads_are_compared_with_its_own(backbone: Backbone) -> None:
    for vocabulary in (None, torch.arange(1, 53, 2)):
        require_comparable(Feature(backbone, 3, vocabulary).double())
    others: list[Drafter] = [build_drafter(kind, backbone, {}) for kind in ("medusa", "eagle3")]
    for drafter in [*others, TinyDrafter(backbone, 2, None), Wrapped(backbone)]:
        with pytest.raises(UserError, match=f"objective.terms.features.*but {type(drafter).__name__} has a readout of its own.*leave"):
            require_comparable(drafter.double())


@pytest.mark.parametrize("weights", ["geometric", "expected"])
@pytest.mark.parametrize("terms", [*WHOLE_TERMS, MIXED_TERMS[1]], ids=str)
def test_under_autocast_it_is_the_naive_objective_within_rounding(terms: dict[str, float], weights: str) -> None:
    """bf16 readouts of fp32 weights, whose gradients are fp32."""
    torch.manual_seed(2)
    backbone = small_backbone(torch.float32)
    drafter, features = TinyDrafter(backbone, 3, None), batch(backbone)
    exact = run(naive, wanted := Objective(terms=terms, depth_weights=weights, chunk_size=7), backbone, drafter, features)  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = run(chunked, wanted, backbone, drafter, features)
    assert {grad.dtype for grad in rounded[len(Sums._fields) :]} == {torch.float32}
    torch.testing.assert_close(rounded[0], exact[0].double(), rtol=0.02, atol=0.02)
    for a, b in zip(rounded[len(Sums._fields) :], exact[len(Sums._fields) :], strict=True):
        assert (a - b).norm() < 0.2 * b.norm()  # the gradient of tv jumps where q crosses p


# The limits of the terms, and their rounding.

C = 6
VOCABULARY = torch.tensor([0, 1, 4, 5, 9, 11, 12, 20])
VOCABULARIES = pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["whole", "draft"])


def logits(vocabulary: Tensor | None, dtype: torch.dtype = torch.float64, sharp: float = 2.0) -> tuple[Tensor, Tensor]:
    """The backbone's logits over all tokens and the draft's over its vocabulary; close to each other, as after some training."""
    generator = torch.Generator().manual_seed(0)
    backbone_CV = sharp * torch.randn(C, V, dtype=torch.float64, generator=generator)
    draft_CV = backbone_CV + torch.randn(C, V, dtype=torch.float64, generator=generator)
    return backbone_CV.to(dtype), (draft_CV if vocabulary is None else draft_CV[:, vocabulary]).to(dtype)


def fused(wanted: Objective, backbone_CV: Tensor, draft_CV: Tensor, vocabulary: Tensor | None, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    teacher = soft_target(backbone_CV, vocabulary)
    draft = compare(teacher, draft_CV)
    return mix(teacher, draft, weight_C, wanted), gradient(draft)


@VOCABULARIES
def test_a_target_from_the_logits_of_the_draft_vocabulary_alone(vocabulary: Tensor | None) -> None:
    backbone_CV, _ = logits(vocabulary)
    tokens = torch.arange(V) if vocabulary is None else vocabulary
    expected = soft_target(backbone_CV, tokens)
    actual = known_target(backbone_CV[:, tokens], backbone_CV.logsumexp(-1), backbone_CV.argmax(-1), tokens)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)
    rounded = known_target(backbone_CV[:, tokens] + 1, backbone_CV.logsumexp(-1), backbone_CV.argmax(-1), tokens)
    assert rounded.mass_C.max() <= 1


def test_every_term_is_covered() -> None:
    assert {name for terms in WHOLE_TERMS for name in terms} == set(TERMS)
    assert {*TERMS, FEATURES} == set(recipe.TERMS), "what a recipe may name"


@VOCABULARIES
@pytest.mark.parametrize("terms", WHOLE_TERMS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-5)], ids=str)
def test_in_fp32_within_rounding(terms: dict[str, float], vocabulary: Tensor | None, dtype: torch.dtype, tolerance: float) -> None:
    """The sums are in fp32 for any dtype of the logits: apart from the logits' own rounding, bf16 is as exact."""
    wanted, weight_C = Objective(terms=terms, top_k=3), torch.ones(C, dtype=torch.float64)
    backbone_CV, draft_CV = logits(vocabulary, dtype)
    exact = fused(wanted, backbone_CV.double(), draft_CV.double(), vocabulary, weight_C)
    rough = fused(wanted, backbone_CV, draft_CV, vocabulary, weight_C.float())
    for a, b in zip(rough, exact, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("terms", WHOLE_TERMS, ids=str)
def test_finite_where_the_two_hardly_meet(terms: dict[str, float]) -> None:
    """Both certain of different tokens, far beyond fp32's resolution near 0 and 1; and a token the backbone rules out."""
    backbone_CV, draft_CV = torch.zeros(2, V), torch.zeros(2, V)
    backbone_CV[:, 3], draft_CV[:, 7] = 300.0, 300.0
    backbone_CV[1, 5] = -float("inf")
    value, gradient_CV = fused(Objective(terms=terms), backbone_CV, draft_CV, None, torch.ones(2))
    assert value.isfinite() and value > 0 and gradient_CV.isfinite().all()
