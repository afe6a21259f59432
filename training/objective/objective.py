"""The training objective: match the backbone's next-token distributions at every depth, without holding ``[T, V]`` logits.

Drafts come from every position of the text, or from a sample of them (anchors), and follow the text's tokens or the drafter's own
(rollouts). In each case the loss is one sum over rows (loss_rows.py), in chunks (fused.py): at each row and depth a mixture of terms
(terms.py) with a weight (depth_weights.py). Drafts at anchors weigh 1 / share, so that the expected loss does not depend on the share.

The loss is a sum over depths and label tokens; the caller divides by the number of label tokens of the whole optimiser step
(`count_label_tokens`), over every process and accumulated micro-batch. That makes the reduction independent of packing, padding,
accumulation and the number of processes, since no term and no weight depends on more than its own draft.

A draft vocabulary restricts the backbone's distribution to tokens that can be drafted, and does *not* renormalise it, so alpha is the
true acceptance rate. A token outside of it counts as wrong in the accuracy.

Shape suffixes: B batch, T positions, D width, K depth, M rows of the loss, N depths after the first (K - 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.training.features.on_policy import FeaturesWithCache
from headstart.training.objective import depth_weights as depths
from headstart.training.objective.anchors import SampledAnchors, StepKey, sample_anchors, text_rows
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import LossRows, dense_rows
from headstart.training.objective.rollout import rollout
from headstart.training.objective.target import target_hidden
from headstart.training.objective.terms import FEATURES, at_least_fp32


class Sums(NamedTuple):
    """Sums over the label tokens of a batch; per depth where the name ends in K. Sums of batches add up."""

    loss: Tensor
    count_K: Tensor
    """Positions at which a depth drafts a label token; at anchors, those sampled."""
    correct_K: Tensor
    """Of them, where the most likely token of draft and backbone agree."""
    alpha_K: Tensor
    """Over them, the sum of the expected acceptance rate ``sum_v min(p_v, q_v)``, p and q at temperature 1."""
    lm_loss: Tensor
    """Cross-entropy of a trainable backbone on the label tokens, part of ``loss``; 0 with a frozen one."""

    @property
    def per_depth(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count_K, self.correct_K, self.alpha_K


def objective(loss: FusedLoss, features: Features, hidden: list[Tensor], anchors: SampledAnchors | None = None) -> Sums:
    """Sums over a batch from what the drafter's forward returned, at the anchors if there are any; only ``loss`` has gradients."""
    settings = loss.settings
    if anchors is None:
        rows, drafts, draft_MK = dense_rows(features, hidden)
        draft_count = features.tokens_BT.numel()
    else:
        rows, drafts, draft_count = text_rows(features, anchors), hidden, len(anchors)
        draft_MK = torch.arange(draft_count, device=rows.counts_MK.device)[:, None].expand(-1, len(hidden))
    dtype = at_least_fp32(drafts[0][:0]).dtype
    if settings.depth_weights == "geometric":
        weights_MK = depths.geometric(settings.depth_decay, rows.counts_MK, dtype)
    else:
        confidence_MK = depths.confidence(loss, rows, drafts).to(dtype)
        weights_MK = depths.expected(confidence_MK, rows.counts_MK, draft_MK, draft_count)
    weights_MK = weights_MK if anchors is None else weights_MK / anchors.share
    total, correct_K, alpha_K = loss.sum(rows.weighted(weights_MK), drafts)
    return Sums(total, rows.counts_MK.sum(0), correct_K, alpha_K, torch.zeros_like(total))


def on_policy_loss(loss: FusedLoss, features: FeaturesWithCache, step_key: StepKey) -> Tensor:
    """Weighted loss of a batch's rollouts, to be divided by the label tokens of the step like the text's; 0 where there are none.

    Depth 0 follows the text and is left out. A depth counts where it would count in the text. Drafting is in the weights' own dtype,
    as `begin` and `step` are not made for autocast.
    """
    settings, drafter = loss.settings, loss.drafter
    anchors = sample_anchors(features, drafter.trained_depth, settings.on_policy_share, step_key, first_depth=1)
    if not len(anchors):
        return features.hidden_BTD.new_zeros((), dtype=torch.float32)
    with torch.autocast(features.tokens_BT.device.type, enabled=False):
        drafted_MN, hidden = rollout(loss, features, anchors)
        hidden_MND = target_hidden(drafter.backbone, features, anchors.at, drafted_MN)
    counts_MN, dtype = anchors.counts_MK[:, 1:], at_least_fp32(hidden[0][:0]).dtype
    weights_MN = depths.geometric(settings.depth_decay, counts_MN, dtype, first_depth=1) * (settings.on_policy / anchors.share)
    return loss.sum(LossRows(hidden_MND, drafted_MN, None, counts_MN, weights_MN, first_depth=1), hidden[1:])[0]


def require_comparable(drafter: Drafter) -> None:
    """Raise UserError unless the drafter's hidden states are read out by the backbone's own output layer, as EAGLE-1's are."""
    if not drafter.own_readout:
        return
    raise UserError(
        f"objective.terms.{FEATURES} compares a drafter's hidden states with the backbone's, but {type(drafter).__name__} has a readout of "
        "its own, so its states mean something else; leave that term out, or train a drafter read out by the backbone (EAGLE-1)"
    )
