"""The training objective: match the backbone's next-token distributions at every depth, without ``[T, V]`` logits.

Drafts start at all positions or at sampled ones (anchors), and are teacher-forced or follow the drafter's own tokens (rollouts). The
loss is a sum over rows (loss_rows.py), computed in chunks (fused.py): for each row and depth a mixture of terms (terms.py) times a
weight (depth_weights.py). Drafts at anchors have weight 1 / share, so that the expected loss does not depend on the share. The depths
after the first may have anchors of their own (`Drafter.deeper_share`): they cost most of a step, and share the first one's weights.

The loss is a sum over depths and label tokens; the caller divides by the number of label tokens of the whole optimiser step
(`count_label_tokens`), over all processes and micro-batches. The result does not depend on packing, padding, accumulation or the
number of processes, since terms and weights depend on their own draft only.

A draft vocabulary restricts the backbone's distribution to tokens that can be drafted and does *not* renormalise it, so that alpha is
the true acceptance rate. A token outside it counts as wrong in the accuracy.

Shape suffixes: B batch, T positions, D width, K depth, M rows of the loss, N depths after the first (K - 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headstart.heads.backbone.features import Anchors, Features
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.training.features.on_policy import FeaturesWithCache
from headstart.training.objective.anchors import SampledAnchors, StepKey, sample_anchors, text_rows
from headstart.training.objective.depth_weights import confidence, expected, geometric
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import LossRows, dense_rows
from headstart.training.objective.rollout import rollout, target_hidden
from headstart.training.objective.terms import FEATURES, at_least_fp32


class Sums(NamedTuple):
    """Sums over the label tokens of a batch, per depth if the name ends in K; additive over batches."""

    loss: Tensor
    count_K: Tensor
    """Number of positions (anchors, if sampled) at which a depth drafts a label token."""
    correct_K: Tensor
    """Number of these positions where draft and backbone agree on the most likely token."""
    alpha_K: Tensor
    """Sum over these positions of the expected acceptance rate ``sum_v min(p_v, q_v)`` at temperature 1."""
    lm_loss: Tensor
    """Cross-entropy of a trainable backbone on the label tokens, included in ``loss`` with its weight; 0 with a frozen one."""
    lm_kl: Tensor
    """KL divergence of a trainable backbone from the original one there, likewise."""

    @property
    def per_depth(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count_K, self.correct_K, self.alpha_K


def objective(
    loss: FusedLoss, features: Features, hidden: list[Tensor], anchors: SampledAnchors | None = None, deeper: Anchors | None = None
) -> Sums:
    """Compute a batch's sums from the hidden states of the drafter's forward, at ``anchors`` if given, or all depths but the first at
    ``deeper``; only ``loss`` has gradients.
    """
    settings = loss.settings
    if anchors is None:
        rows, drafts, draft_MK = dense_rows(features, hidden, deeper)
        draft_count = features.tokens_BT.numel()
    else:
        rows, drafts, draft_count = text_rows(features, anchors), hidden, len(anchors)
        draft_MK = torch.arange(draft_count, device=rows.counts_MK.device)[:, None].expand(-1, len(hidden))
    dtype = at_least_fp32(drafts[0][:0]).dtype
    if settings.depth_weights == "geometric":
        weights_MK = geometric(settings.depth_decay, rows.counts_MK, dtype)
    else:
        confidence_MK = confidence(loss, rows, drafts).to(dtype)
        weights_MK = expected(confidence_MK, rows.counts_MK, draft_MK, draft_count, rows.drawn_MK)
    weights_MK = weights_MK if anchors is None else weights_MK / anchors.share
    drawn_MK = rows.counts_MK if rows.drawn_MK is None else rows.drawn_MK
    if deeper is not None:
        weights_MK = torch.cat([weights_MK[:, :1], weights_MK[:, 1:] * drawn_MK[:, 1:] / loss.drafter.deeper_share], 1)
    total, correct_K, alpha_K = loss.sum(rows.weighted(weights_MK), drafts)
    return Sums(total, drawn_MK.sum(0), correct_K, alpha_K, torch.zeros_like(total), torch.zeros_like(total))


def on_policy_loss(loss: FusedLoss, features: FeaturesWithCache, step_key: StepKey) -> Tensor:
    """Compute the weighted loss of a batch's rollouts, with the same divisor as the teacher-forced loss; 0 if there are no anchors.

    Depth 0 is omitted, since its inputs are those of teacher forcing. A depth counts where it would count in teacher forcing. Drafting uses
    the weights' dtype, since `begin` and `step` do not support autocast.
    """
    settings, drafter = loss.settings, loss.drafter
    anchors = sample_anchors(features, drafter.trained_depth, settings.on_policy_share, step_key, first_depth=1)
    if not len(anchors):
        return features.hidden_BTD.new_zeros((), dtype=torch.float32)
    with torch.autocast(features.tokens_BT.device.type, enabled=False):
        drafted_MN, hidden = rollout(loss, features, anchors)
        hidden_MND = target_hidden(drafter.backbone, features, anchors.at, drafted_MN)
    counts_MN, dtype = anchors.counts_MK[:, 1:], at_least_fp32(hidden[0][:0]).dtype
    weights_MN = geometric(settings.depth_decay, counts_MN, dtype, first_depth=1) * (settings.on_policy / anchors.share)
    return loss.sum(LossRows(hidden_MND, drafted_MN, None, counts_MN, weights_MN, first_depth=1), hidden[1:])[0]


def require_comparable(drafter: Drafter) -> None:
    """Raise UserError unless the drafter's logits come from the backbone's output layer, as in EAGLE-1."""
    if not drafter.own_readout:
        return
    raise UserError(
        f"objective.terms.{FEATURES} compares a drafter's hidden states with the backbone's, but {type(drafter).__name__} has a readout of "
        "its own, so its states mean something else; leave that term out, or train a drafter read out by the backbone (EAGLE-1)"
    )
