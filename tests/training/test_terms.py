"""The limits of the terms of the objective, and their rounding. (Values and gradients by formula: test_objective.py.)

Shape suffixes: C positions of a chunk, V draft vocabulary.
"""

import pytest
import torch
from guess import WHOLE_TERMS
from torch import Tensor

from headstart.training.objective.terms import (
    FEATURES,
    TERMS,
    DraftProbs,
    SoftTarget,
    compare,
    gradient,
    known_target,
    mix,
    soft_target,
)  # fmt: skip
from headstart.training.recipe import training as recipe
from headstart.training.recipe.training import Objective

C, V = 6, 23
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


@pytest.mark.parametrize("terms", [terms for terms in WHOLE_TERMS if "ce" not in terms], ids=str)
def test_a_perfect_draft_has_no_divergence_and_is_left_alone(terms: dict[str, float]) -> None:
    backbone_CV, _ = logits(None)
    value, gradient_CV = fused(Objective(terms=terms), backbone_CV, backbone_CV.clone(), None, torch.ones(C, dtype=torch.float64))
    torch.testing.assert_close(value, torch.zeros_like(value), atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient_CV, torch.zeros_like(gradient_CV), atol=1e-12, rtol=0)


def compared(vocabulary: Tensor | None) -> tuple[SoftTarget, DraftProbs]:
    backbone_CV, draft_CV = logits(vocabulary)
    teacher = soft_target(backbone_CV, vocabulary)
    return teacher, compare(teacher, draft_CV)


@VOCABULARIES
def test_acceptance_counts_what_cannot_be_drafted(vocabulary: Tensor | None) -> None:
    """``1 - tv`` is the acceptance rate of whole distributions, the draft's being 0 outside its vocabulary."""
    backbone_CV, draft_CV = logits(vocabulary)
    q_CV = torch.zeros(C, V, dtype=torch.float64)
    q_CV[:, torch.arange(V) if vocabulary is None else vocabulary] = draft_CV.softmax(-1)
    total_variation_C = (backbone_CV.softmax(-1) - q_CV).abs().sum(-1) / 2
    teacher, draft = compared(vocabulary)
    torch.testing.assert_close(1 - draft.alpha_C, total_variation_C)
    assert vocabulary is None or (teacher.mass_C < 1 - 1e-6).all()
