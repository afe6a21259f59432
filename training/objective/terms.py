"""How far the draft's distribution q is from the backbone's p: the terms a recipe mixes, each with its gradient written out.

q is the softmax of the draft's logits z over the draft vocabulary. p is the backbone's distribution over those tokens, *not*
renormalised: its mass ``m = sum_v p_v`` is what a draft can hit at all. Acceptance is ``alpha = sum_v min(p_v, q_v)``, the chance
that draft and backbone agree under lossless sampling; ``1 - alpha`` is their total variation over the whole vocabulary.

    kl          sum_v p_v log(p_v / q_v)
    reverse_kl  sum_v q_v log(q_v / p_v)
    js          half of KL(p | h) + KL(q | h), h = (p + q) / 2, over the whole vocabulary
    ce          -log q of the backbone's first choice; nothing where that cannot be drafted
    tv          1 - alpha
    lk_alpha    -log alpha (2602.23881)
    lk          w kl + (1 - w) tv with w = exp(-eta alpha) held constant: KL that turns into acceptance (2602.23881)
    topk_kl     kl over the k likeliest tokens and one bin for all others; HASS looks at such tokens alone (2408.15766)
    features    smooth L1 between the drafter's hidden state and the backbone's, mean over the width (EAGLE-1, 2401.15077)

A term gives its value and adds ``dL / d log q_v`` to a pull that all terms share; `gradient` turns the pull into that of the
logits, ``dL/dz_v = pull_v - q_v sum_u pull_u``. So nothing here is recorded by autograd, and a mixture costs little more than
one of its terms. tests/test_terms.py compares each with autograd of the formula above, in float64.

Shape suffixes: C positions of a chunk, V draft vocabulary, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from headstart.training.recipe.recipe import Objective  # that reads TERMS

LEAST = 1e-6
"""Acceptance below which -log alpha goes on as its tangent, so that its gradient stays finite."""


class Teacher(NamedTuple):
    """What the backbone says at the positions of a chunk."""

    p_CV: Tensor
    """Over the draft vocabulary, not renormalised."""
    mass_C: Tensor
    negentropy_C: Tensor
    """``sum_v p_v log p_v``: what makes cross-entropy with soft targets a divergence."""
    choice_C: Tensor
    """Its first choice, over the whole vocabulary."""
    target_C: Tensor
    """Place of that choice in the draft vocabulary; of some other token where it has none."""
    has_target_C: Tensor


class Draft(NamedTuple):
    """What the draft says there."""

    logits_CV: Tensor
    q_CV: Tensor
    norm_C: Tensor
    """``log sum_v exp z_v``."""
    choice_C: Tensor
    """Place of its first choice in the draft vocabulary."""
    cross_C: Tensor
    """``sum_v p_v z_v``."""
    overlap_C: Tensor
    """Acceptance."""
    pull_CV: Tensor
    """Sum over the terms, so far, of ``dL / d log q``."""


def teach(logits_CV: Tensor, vocabulary: Tensor | None) -> Teacher:
    """From the backbone's logits over its whole vocabulary."""
    logits_CV = wide(logits_CV)
    choice_C = logits_CV.argmax(-1)
    p_CV = logits_CV.softmax(-1)
    target_C, has_target_C = choice_C, torch.ones_like(choice_C, dtype=torch.bool)
    if vocabulary is not None:
        p_CV = p_CV.index_select(-1, vocabulary)
        target_C, has_target_C = in_vocabulary(choice_C, vocabulary)
    return Teacher(p_CV, p_CV.sum(-1), _self_sum(p_CV), choice_C, target_C, has_target_C)


def in_vocabulary(tokens_C: Tensor, vocabulary: Tensor | None) -> tuple[Tensor, Tensor]:
    """LossRows of the backbone's tokens in the draft vocabulary, and whether they have one (else the place is some other's)."""
    if vocabulary is None:
        return tokens_C, torch.ones_like(tokens_C, dtype=torch.bool)
    place_C = torch.searchsorted(vocabulary, tokens_C).clamp(max=len(vocabulary) - 1)
    return place_C, vocabulary[place_C] == tokens_C


def compare(teacher: Teacher, logits_CV: Tensor) -> Draft:
    """From the draft's logits; nothing pulls yet."""
    logits_CV = logits_CV.to(torch.promote_types(wide(logits_CV[:0]).dtype, teacher.p_CV.dtype))
    q_CV, choice_C = logits_CV.softmax(-1), logits_CV.argmax(-1)
    norm_C = (logits_CV.gather(-1, choice_C[:, None]) - q_CV.gather(-1, choice_C[:, None]).log()).squeeze(-1)
    room_CV = teacher.p_CV * logits_CV   # one room for all that is only summed, and in the end for the pull
    cross_C = room_CV.sum(-1)
    overlap_C = torch.minimum(teacher.p_CV, q_CV, out=room_CV).sum(-1)
    return Draft(logits_CV, q_CV, norm_C, choice_C, cross_C, overlap_C, room_CV.zero_())


def gradient(draft: Draft) -> Tensor:
    """``[C, V]``: the pull as a gradient of the logits, in its place."""
    return draft.pull_CV.addcmul_(draft.q_CV, draft.pull_CV.sum(-1, keepdim=True), value=-1)


def wide(logits: Tensor) -> Tensor:
    """At least fp32: the softmax of bf16 logits is too coarse to learn from."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


Term = Callable[[Teacher, Draft, Tensor, "Objective"], Tensor]
"""Adds the pull of ``weight_C`` times the term, and returns the term's value at each position, ``[C]``, without the weight."""


def kl(teacher: Teacher, draft: Draft, weight_C: Tensor, wanted: Objective) -> Tensor:
    draft.pull_CV.addcmul_(teacher.p_CV, weight_C[:, None], value=-1)
    return teacher.negentropy_C + teacher.mass_C * draft.norm_C - draft.cross_C


def reverse_kl(teacher: Teacher, draft: Draft, weight_C: Tensor, wanted: Objective) -> Tensor:
    apart_CV = (draft.logits_CV - draft.norm_C[:, None]).sub_(_log(teacher.p_CV)).mul_(draft.q_CV)
    draft.pull_CV.addcmul_(apart_CV, weight_C[:, None])
    return apart_CV.sum(-1)


def js(teacher: Teacher, draft: Draft, weight_C: Tensor, wanted: Objective) -> Tensor:
    half_CV = (teacher.p_CV + draft.q_CV).div_(2)
    apart_CV = _log(draft.q_CV).sub_(_log(half_CV)).mul_(draft.q_CV)
    draft.pull_CV.addcmul_(apart_CV, weight_C[:, None], value=0.5)
    to_half_C = teacher.negentropy_C - torch.linalg.vecdot(teacher.p_CV, _log(half_CV))
    outside_C = (1 - teacher.mass_C) * math.log(2)   # there q is 0 and h is p / 2
    return (to_half_C + apart_CV.sum(-1) + outside_C) / 2


def ce(teacher: Teacher, draft: Draft, weight_C: Tensor, wanted: Objective) -> Tensor:
    place_C1 = teacher.target_C[:, None]
    draft.pull_CV.scatter_add_(-1, place_C1, -(weight_C * teacher.has_target_C)[:, None].to(draft.pull_CV.dtype))
    return (draft.norm_C - draft.logits_CV.gather(-1, place_C1).squeeze(-1)) * teacher.has_target_C


def tv(teacher: Teacher, draft: Draft, weight_C: Tensor, wanted: Objective) -> Tensor:
    below_CV = torch.where(draft.q_CV < teacher.p_CV, draft.q_CV, 0)
    draft.pull_CV.addcmul_(below_CV, weight_C[:, None], value=-1)
    return 1 - draft.overlap_C


def lk_alpha(teacher: Teacher, draft: Draft, weight_C: Tensor, wanted: Objective) -> Tensor:
    floored_C = draft.overlap_C.clamp(min=LEAST)
    tv(teacher, draft, weight_C / floored_C, wanted)
    return 1 - draft.overlap_C / floored_C - floored_C.log()


def lk(teacher: Teacher, draft: Draft, weight_C: Tensor, wanted: Objective) -> Tensor:
    far_C = (-wanted.lk_eta * draft.overlap_C).exp()
    return far_C * kl(teacher, draft, weight_C * far_C, wanted) + (1 - far_C) * tv(teacher, draft, weight_C * (1 - far_C), wanted)


def topk_kl(teacher: Teacher, draft: Draft, weight_C: Tensor, wanted: Objective) -> Tensor:
    top_p_CK, top_CK = teacher.p_CV.topk(min(wanted.top_k, teacher.p_CV.shape[-1]), -1)
    rest_p_C = (teacher.mass_C - top_p_CK.sum(-1)).clamp(min=0)
    rest_q_CV = draft.q_CV.scatter(-1, top_CK, 0)
    rest_q_C = rest_q_CV.sum(-1).clamp(min=torch.finfo(rest_q_CV.dtype).tiny)
    draft.pull_CV.scatter_add_(-1, top_CK, -(weight_C[:, None] * top_p_CK))
    draft.pull_CV.addcmul_(rest_q_CV, (weight_C * rest_p_C / rest_q_C)[:, None], value=-1)
    top_log_q_CK = draft.logits_CV.gather(-1, top_CK) - draft.norm_C[:, None]
    in_top_C = _self_sum(top_p_CK) - (top_p_CK * top_log_q_CK).sum(-1)
    return in_top_C + rest_p_C * (_log(rest_p_C) - rest_q_C.log())


TERMS: dict[str, Term] = {
    "kl": kl, "reverse_kl": reverse_kl, "js": js, "ce": ce, "tv": tv, "lk_alpha": lk_alpha, "lk": lk, "topk_kl": topk_kl,
}  # fmt: skip
"""The terms that compare distributions."""
FEATURES = "features"
"""The one that compares hidden states: `regression`."""
NAMES = (*TERMS, FEATURES)
"""What a recipe may mix."""


def mix(teacher: Teacher, draft: Draft, weight_C: Tensor, wanted: Objective) -> Tensor:
    """Sum of the weighted terms over the positions; their pulls are added to the draft's."""
    total = weight_C.new_zeros((), dtype=draft.q_CV.dtype)
    for name, share in wanted.terms.items():
        if share and name in TERMS:
            total = total + share * (weight_C * TERMS[name](teacher, draft, share * weight_C, wanted)).sum()
    return total


def regression(drafted_CD: Tensor, hidden_CD: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum of the ``features`` term, and its gradient with respect to the drafted states, ``[C, D]``."""
    drafted_CD = wide(drafted_CD)
    hidden_CD = hidden_CD.to(drafted_CD.dtype)
    value_C = F.smooth_l1_loss(drafted_CD, hidden_CD, reduction="none").mean(-1)
    return (weight_C * value_C).sum(), (drafted_CD - hidden_CD).clamp_(-1, 1).mul_(weight_C[:, None] / drafted_CD.shape[-1])


def _self_sum(p_CV: Tensor) -> Tensor:
    """``sum_v p_v log p_v``."""
    return torch.linalg.vecdot(p_CV, _log(p_CV))


def _log(p: Tensor) -> Tensor:
    """Of probabilities, as a new tensor; that of 0 is finite (about -87 in fp32), so that 0 log 0 is 0."""
    return p.clamp(min=torch.finfo(p.dtype).tiny).log_()
