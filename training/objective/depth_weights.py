"""Weights of the depths in the loss: geometric decay, or each depth's effect on the expected accepted length.

The expected number of accepted tokens of a draft from t is ``sum_k prod_{i<=k} a_i``, with a_i the acceptance probability of depth i.
Its derivative with respect to ``log a_k`` is ``sum_{j>=k} prod_{i<=j} a_i``: the weight of D-PACE (2605.18810), with a_i the draft's
probability of the label, smoothed towards 1 and without gradient. It needs all depths of a draft, so the readouts run an additional
time before the loss, without gradients.

Shape suffixes: M rows of the loss, C rows of a chunk, V draft vocabulary, N drafts, K depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import LossRows
from headstart.training.objective.terms import at_least_fp32, in_vocabulary

SMOOTHING = 0.5
"""a = SMOOTHING + (1 - SMOOTHING) q, so that depths after an unlikely one keep some weight (2605.18810)."""


def geometric(decay: float, counts_MK: Tensor, dtype: torch.dtype, first_depth: int = 0) -> Tensor:
    """Return weights ``decay ** k``, ``[M, K]``, with k from ``first_depth``; 0 where a depth does not count."""
    depths = range(first_depth, first_depth + counts_MK.shape[1])
    decay_K = torch.tensor([decay**k for k in depths], dtype=dtype, device=counts_MK.device)
    return counts_MK * decay_K


def confidence(loss: FusedLoss, rows: LossRows, drafts: list[Tensor]) -> Tensor:
    """Return the draft's probability of the label at each depth, ``[M, K]``; 0 for labels outside the draft vocabulary."""
    assert rows.labels_MJ is not None
    prob_MK = at_least_fp32(drafts[0][:0]).new_zeros(len(rows), len(drafts))
    index_MJ, known_MJ = in_vocabulary(rows.labels_MJ, loss.vocabulary)
    for chunk in loss.chunks(len(rows)):
        for k, draft_MD in enumerate(drafts):
            at, j = rows.drafted(chunk, k), min(k, index_MJ.shape[1] - 1)
            # Autograd stays enabled; otherwise autocast would cache weight casts that have no graph.
            logits_CV = at_least_fp32(loss.chunk_logits(draft_MD, k, at, rows.part(at))[1].detach())
            log_prob_C = logits_CV.gather(-1, index_MJ[at, j, None]).squeeze(-1) - logits_CV.logsumexp(-1)
            prob_MK[at, k] = log_prob_C.exp() * known_MJ[at, j]
    return prob_MK


def expected(confidence_MK: Tensor, counts_MK: Tensor, draft_MK: Tensor, drafts: int, drawn_MK: Tensor | None = None) -> Tensor:
    """Return D-PACE's weights, ``[M, K]``; entry (m, k) is depth k of draft ``draft_MK[m, k]``, an index below ``drafts``.

    A depth that does not count has weight 0 and does not affect the weights of deeper ones. One that was not drafted (``drawn_MK``) is
    taken to be as likely as the draft's first.
    """
    K = counts_MK.shape[1]
    smooth_MK = SMOOTHING + (1 - SMOOTHING) * confidence_MK
    # Arrange by draft and depth; an additional draft takes entries that do not count.
    index_MK = torch.where(counts_MK, draft_MK, drafts) * K + torch.arange(K, device=counts_MK.device)
    smooth_NK = smooth_MK.new_ones((drafts + 1) * K).scatter_(0, index_MK.flatten(), smooth_MK.flatten()).view(-1, K)
    if drawn_MK is not None:
        drawn_NK = drawn_MK.new_ones((drafts + 1) * K).scatter_(0, index_MK.flatten(), drawn_MK.flatten()).view(-1, K)
        smooth_NK = torch.where(drawn_NK, smooth_NK, smooth_NK[:, :1])
    counts_NK = smooth_MK.new_zeros((drafts + 1) * K).scatter_(0, index_MK.flatten(), 1.0).view(-1, K)
    reached_NK = smooth_NK.cumprod(1) * counts_NK
    beyond_NK = reached_NK.flip(1).cumsum(1).flip(1)
    return beyond_NK.flatten()[index_MK] * counts_MK
