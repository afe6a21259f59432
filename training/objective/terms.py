"""Loss terms that compare the draft's distribution q with the backbone's p, each with an explicit gradient.

q is the softmax of the draft's logits z over the draft vocabulary. p is the backbone's distribution over those tokens, *not*
renormalised: its mass ``m = sum_v p_v`` bounds the acceptance rate. The expected acceptance rate of lossless sampling is
``alpha = sum_v min(p_v, q_v)``; ``1 - alpha`` is the total variation distance over the whole vocabulary.

    kl          sum_v p_v log(p_v / q_v)
    reverse_kl  sum_v q_v log(q_v / p_v)
    js          half of KL(p | h) + KL(q | h), h = (p + q) / 2, over the whole vocabulary
    ce          -log q of the backbone's most likely token; 0 where the draft vocabulary lacks that token
    tv          1 - alpha
    lk_alpha    -log alpha (2602.23881)
    lk          w kl + (1 - w) tv with w = exp(-eta alpha) held constant: shifts from KL to TV as alpha grows (2602.23881)
    topk_kl     kl over the k most likely tokens and one bin for all others; HASS uses those tokens alone (2408.15766)
    features    smooth L1 between the drafter's hidden state and the backbone's, mean over the width (EAGLE-1, 2401.15077)

Each term returns its value and adds its gradient ``g_v = dL / d log q_v`` to a buffer shared by all terms; `gradient` converts
the buffer to the gradient of the logits, ``dL/dz_v = g_v - q_v sum_u g_u``. Autograd is not used, and a mixture costs
little more than one term. tests/training/test_objective.py checks every term against autograd in float64.

Shape suffixes: C positions of a chunk, V draft vocabulary, D width.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.training.recipe.training import Objective

MIN_ALPHA = 1e-6
"""Acceptance rate below which -log alpha is replaced by its tangent, so that the gradient stays finite."""
FEATURES = "features"
"""The term that compares hidden states: `regression`."""


class SoftTarget(NamedTuple):
    """The backbone's next-token distributions at the positions of a chunk."""

    p_CV: Tensor
    """Probabilities over the draft vocabulary, not renormalised."""
    mass_C: Tensor
    negentropy_C: Tensor
    """``sum_v p_v log p_v``; the KL divergence is this plus the cross-entropy."""
    choice_C: Tensor
    """Most likely token of the whole vocabulary."""
    target_C: Tensor
    """Index of that token in the draft vocabulary; arbitrary where ``has_target_C`` is False."""
    has_target_C: Tensor


class DraftProbs(NamedTuple):
    """The draft's distributions at the same positions, and the gradient of the loss with respect to them."""

    logits_CV: Tensor
    q_CV: Tensor
    norm_C: Tensor
    """``log sum_v exp z_v``."""
    choice_C: Tensor
    """Index of the most likely token in the draft vocabulary."""
    cross_C: Tensor
    """``sum_v p_v z_v``."""
    alpha_C: Tensor
    """Expected acceptance rate."""
    log_q_grad_CV: Tensor
    """``dL / d log q``, summed over the terms added so far."""


def soft_target(logits_CV: Tensor, vocabulary: Tensor | None) -> SoftTarget:
    """Compute targets from the backbone's logits over its whole vocabulary."""
    logits_CV = at_least_fp32(logits_CV)
    choice_C = logits_CV.argmax(-1)
    p_CV = logits_CV.softmax(-1)
    target_C, has_target_C = choice_C, torch.ones_like(choice_C, dtype=torch.bool)
    if vocabulary is not None:
        p_CV = p_CV.index_select(-1, vocabulary)
        target_C, has_target_C = in_vocabulary(choice_C, vocabulary)
    return SoftTarget(p_CV, p_CV.sum(-1), _sum_p_log_p(p_CV), choice_C, target_C, has_target_C)


def known_target(logits_CV: Tensor, norm_C: Tensor, choice_C: Tensor, vocabulary: Tensor) -> SoftTarget:
    """Compute `soft_target` from the logits of the draft vocabulary alone, with the normaliser and the choice of all.

    The normaliser may be that of states before they were rounded, so that the mass has to be kept from exceeding 1.
    """
    logits_CV = at_least_fp32(logits_CV)
    mass_C = (logits_CV.logsumexp(-1) - norm_C).exp_().clamp_(max=1)
    p_CV = logits_CV.softmax(-1).mul_(mass_C[:, None])
    return SoftTarget(p_CV, mass_C, _sum_p_log_p(p_CV), choice_C, *in_vocabulary(choice_C, vocabulary))


def in_vocabulary(tokens_C: Tensor, vocabulary: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the indices of backbone tokens in the draft vocabulary (arbitrary if absent), and whether they are in it."""
    if vocabulary is None:
        return tokens_C, torch.ones_like(tokens_C, dtype=torch.bool)
    index_C = torch.searchsorted(vocabulary, tokens_C).clamp(max=len(vocabulary) - 1)
    return index_C, vocabulary[index_C] == tokens_C


def compare(teacher: SoftTarget, logits_CV: Tensor) -> DraftProbs:
    """Compute the draft's distributions, with an empty gradient buffer."""
    logits_CV = logits_CV.to(torch.promote_types(at_least_fp32(logits_CV[:0]).dtype, teacher.p_CV.dtype))
    q_CV, choice_C = logits_CV.softmax(-1), logits_CV.argmax(-1)
    norm_C = (logits_CV.gather(-1, choice_C[:, None]) - q_CV.gather(-1, choice_C[:, None]).log()).squeeze(-1)
    buffer_CV = teacher.p_CV * logits_CV  # one buffer for products that are only summed, then for the gradient
    cross_C = buffer_CV.sum(-1)
    alpha_C = torch.minimum(teacher.p_CV, q_CV, out=buffer_CV).sum(-1)
    return DraftProbs(logits_CV, q_CV, norm_C, choice_C, cross_C, alpha_C, buffer_CV.zero_())


def gradient(draft: DraftProbs) -> Tensor:
    """Convert the gradient with respect to log q to that of the logits, in place: ``[C, V]``."""
    return draft.log_q_grad_CV.addcmul_(draft.q_CV, draft.log_q_grad_CV.sum(-1, keepdim=True), value=-1)


def at_least_fp32(logits: Tensor) -> Tensor:
    """Upcast to at least fp32, since a softmax in bf16 is too coarse for training."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


Term = Callable[[SoftTarget, DraftProbs, Tensor, Objective], Tensor]
"""Adds the gradient of ``weight_C`` times the term to the buffer, and returns the term's unweighted values, ``[C]``."""


def kl(teacher: SoftTarget, draft: DraftProbs, weight_C: Tensor, settings: Objective) -> Tensor:
    draft.log_q_grad_CV.addcmul_(teacher.p_CV, weight_C[:, None], value=-1)
    return teacher.negentropy_C + teacher.mass_C * draft.norm_C - draft.cross_C


def reverse_kl(teacher: SoftTarget, draft: DraftProbs, weight_C: Tensor, settings: Objective) -> Tensor:
    apart_CV = (draft.logits_CV - draft.norm_C[:, None]).sub_(_log(teacher.p_CV)).mul_(draft.q_CV)
    draft.log_q_grad_CV.addcmul_(apart_CV, weight_C[:, None])
    return apart_CV.sum(-1)


def js(teacher: SoftTarget, draft: DraftProbs, weight_C: Tensor, settings: Objective) -> Tensor:
    half_CV = (teacher.p_CV + draft.q_CV).div_(2)
    apart_CV = _log(draft.q_CV).sub_(_log(half_CV)).mul_(draft.q_CV)
    draft.log_q_grad_CV.addcmul_(apart_CV, weight_C[:, None], value=0.5)
    to_half_C = teacher.negentropy_C - torch.linalg.vecdot(teacher.p_CV, _log(half_CV))
    outside_C = (1 - teacher.mass_C) * math.log(2)  # outside, q is 0 and h is p / 2
    return (to_half_C + apart_CV.sum(-1) + outside_C) / 2


def ce(teacher: SoftTarget, draft: DraftProbs, weight_C: Tensor, settings: Objective) -> Tensor:
    index_C1 = teacher.target_C[:, None]
    draft.log_q_grad_CV.scatter_add_(-1, index_C1, -(weight_C * teacher.has_target_C)[:, None].to(draft.log_q_grad_CV.dtype))
    return (draft.norm_C - draft.logits_CV.gather(-1, index_C1).squeeze(-1)) * teacher.has_target_C


def tv(teacher: SoftTarget, draft: DraftProbs, weight_C: Tensor, settings: Objective) -> Tensor:
    below_CV = torch.where(draft.q_CV < teacher.p_CV, draft.q_CV, 0)
    draft.log_q_grad_CV.addcmul_(below_CV, weight_C[:, None], value=-1)
    return 1 - draft.alpha_C


def lk_alpha(teacher: SoftTarget, draft: DraftProbs, weight_C: Tensor, settings: Objective) -> Tensor:
    floored_C = draft.alpha_C.clamp(min=MIN_ALPHA)
    tv(teacher, draft, weight_C / floored_C, settings)
    return 1 - draft.alpha_C / floored_C - floored_C.log()


def lk(teacher: SoftTarget, draft: DraftProbs, weight_C: Tensor, settings: Objective) -> Tensor:
    w_C = (-settings.lk_eta * draft.alpha_C).exp()
    return w_C * kl(teacher, draft, weight_C * w_C, settings) + (1 - w_C) * tv(teacher, draft, weight_C * (1 - w_C), settings)


def topk_kl(teacher: SoftTarget, draft: DraftProbs, weight_C: Tensor, settings: Objective) -> Tensor:
    top_p_CK, top_CK = teacher.p_CV.topk(min(settings.top_k, teacher.p_CV.shape[-1]), -1)
    rest_p_C = (teacher.mass_C - top_p_CK.sum(-1)).clamp(min=0)
    rest_q_CV = draft.q_CV.scatter(-1, top_CK, 0)
    rest_q_C = rest_q_CV.sum(-1).clamp(min=torch.finfo(rest_q_CV.dtype).tiny)
    draft.log_q_grad_CV.scatter_add_(-1, top_CK, -(weight_C[:, None] * top_p_CK))
    draft.log_q_grad_CV.addcmul_(rest_q_CV, (weight_C * rest_p_C / rest_q_C)[:, None], value=-1)
    top_log_q_CK = draft.logits_CV.gather(-1, top_CK) - draft.norm_C[:, None]
    in_top_C = _sum_p_log_p(top_p_CK) - (top_p_CK * top_log_q_CK).sum(-1)
    return in_top_C + rest_p_C * (_log(rest_p_C) - rest_q_C.log())


TERMS: dict[str, Term] = {
    "kl": kl, "reverse_kl": reverse_kl, "js": js, "ce": ce, "tv": tv, "lk_alpha": lk_alpha, "lk": lk, "topk_kl": topk_kl,
}  # fmt: skip
"""Terms that compare distributions."""


def mix(teacher: SoftTarget, draft: DraftProbs, weight_C: Tensor, settings: Objective) -> Tensor:
    """Sum the weighted terms over the positions; their gradients are added to the draft's buffer."""
    total = weight_C.new_zeros((), dtype=draft.q_CV.dtype)
    for name, share in settings.terms.items():
        if share and name in TERMS:
            total = total + share * (weight_C * TERMS[name](teacher, draft, share * weight_C, settings)).sum()
    return total


class Compared(NamedTuple):
    """What a chunk's logits of one depth give."""

    loss: Tensor
    gradient_CV: Tensor
    """Of the loss with respect to the logits."""
    choice_C: Tensor
    """See `DraftProbs`."""
    alpha_C: Tensor


def compare_and_mix(teacher: SoftTarget, logits_CV: Tensor, weight_C: Tensor, settings: Objective) -> Compared:
    """Compute the weighted loss of some logits, its gradient, and what is counted; autograd is not used."""
    draft = compare(teacher, logits_CV)
    loss = mix(teacher, draft, weight_C, settings)
    return Compared(loss, gradient(draft), draft.choice_C, draft.alpha_C)


@functools.cache
def compiled() -> Callable[[SoftTarget, Tensor, Tensor, Objective], Compared]:
    """`compare_and_mix` compiled by torch, for any number of positions: fewer kernels (``train.compile``)."""
    return torch.compile(compare_and_mix, dynamic=True)


def regression(drafted_CD: Tensor, hidden_CD: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the ``features`` term and its gradient with respect to the drafted hidden states, ``[C, D]``."""
    drafted_CD = at_least_fp32(drafted_CD)
    hidden_CD = hidden_CD.to(drafted_CD.dtype)
    value_C = F.smooth_l1_loss(drafted_CD, hidden_CD, reduction="none").mean(-1)
    return (weight_C * value_C).sum(), (drafted_CD - hidden_CD).clamp_(-1, 1).mul_(weight_C[:, None] / drafted_CD.shape[-1])


def likelihood(odds_C: Tensor, alpha_C: Tensor, weight_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted cross-entropy of estimated acceptance, as log-odds, with the acceptance rates, and its gradient, ``[C]``."""
    odds_C = at_least_fp32(odds_C.detach())
    value_C = F.binary_cross_entropy_with_logits(odds_C, alpha_C.to(odds_C.dtype), reduction="none")
    return (weight_C * value_C).sum(), (odds_C.sigmoid() - alpha_C) * weight_C


def _sum_p_log_p(p_CV: Tensor) -> Tensor:
    """Compute ``sum_v p_v log p_v``."""
    return torch.linalg.vecdot(p_CV, _log(p_CV))


def _log(p: Tensor) -> Tensor:
    """Return the log of probabilities as a new tensor, finite at 0 (about -87 in fp32), so that 0 log 0 is 0."""
    return p.clamp(min=torch.finfo(p.dtype).tiny).log_()
