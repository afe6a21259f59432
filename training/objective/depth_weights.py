"""What a depth's loss weighs: geometrically less the deeper it is, or by what it adds to the expected length of a draft.

The expected number of accepted tokens of a draft from t is ``sum_k prod_{i<=k} a_i``, a_i the chance that depth i is right. How
much of it hangs on depth k, its derivative by ``log a_k``, is ``sum_{j>=k} prod_{i<=j} a_i``: the weight of D-PACE (2605.18810),
with a_i the probability the draft gives to the text's own token, smoothed towards 1 and held constant. It needs all depths of
a draft, so the readouts run once more, before the loss, without a gradient.

Shape suffixes: M teacher positions, C those of a chunk, V draft vocabulary, N drafts, K depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.training.objective.fused import Fused, LossRows
from headstart.training.objective.terms import in_vocabulary, wide

SMOOTHING = 0.5
"""a = SMOOTHING + (1 - SMOOTHING) q, so that a depth behind an unlikely one still learns (2605.18810)."""


def geometric(decay: float, counts_MK: Tensor, dtype: torch.dtype) -> Tensor:
    """``decay ** k``, ``[M, K]``; 0 where a depth does not count."""
    decay_K = torch.tensor([decay**k for k in range(counts_MK.shape[1])], dtype=dtype, device=counts_MK.device)
    return counts_MK * decay_K


def confidence(fused: Fused, places: LossRows, drafts: list[Tensor]) -> Tensor:
    """``[M, K]``: the probability each depth gives to the text's own token; 0 for a token it cannot draft."""
    sure_MK = wide(drafts[0][:0]).new_zeros(len(places.text_M), len(drafts))
    for rows in fused.chunks(len(places.text_M)):
        place_C, has_place_C = in_vocabulary(places.text_M[rows], fused.vocabulary)
        for k, draft_MD in enumerate(drafts):
            # Autograd stays on: a weight that autocast casts for the first time without it would be remembered without it.
            logits_CV = wide(fused.read(draft_MD, k, rows, places.given_M[rows])[1].detach())
            sure_MK[rows, k] = (logits_CV.gather(-1, place_C[:, None]).squeeze(-1) - logits_CV.logsumexp(-1)).exp() * has_place_C
    return sure_MK


def expected(confidence_MK: Tensor, counts_MK: Tensor, draft_MK: Tensor, drafts: int) -> Tensor:
    """D-PACE's weights, ``[M, K]``, where depth k of draft number ``draft_MK`` (below ``drafts``) drafts the token of a place.

    A depth that does not count weighs nothing, and does not stand in the way of those behind it.
    """
    K = counts_MK.shape[1]
    smooth_MK = SMOOTHING + (1 - SMOOTHING) * confidence_MK
    # The depths of a draft side by side; one draft more takes what does not count.
    place_MK = torch.where(counts_MK, draft_MK, drafts) * K + torch.arange(K, device=counts_MK.device)
    smooth_NK = smooth_MK.new_ones((drafts + 1) * K).scatter_(0, place_MK.flatten(), smooth_MK.flatten()).view(-1, K)
    counts_NK = smooth_MK.new_zeros((drafts + 1) * K).scatter_(0, place_MK.flatten(), 1.0).view(-1, K)
    reached_NK = smooth_NK.cumprod(1) * counts_NK
    beyond_NK = reached_NK.flip(1).cumsum(1).flip(1)
    return beyond_NK.flatten()[place_MK] * counts_MK
