"""The training objective: match the backbone's next-token distributions at every depth, without ``[T, V]`` logits.

Drafts start at all positions or at sampled ones (anchors), and are teacher-forced or follow the drafter's own tokens (rollouts). The
loss is a sum over rows (loss_rows.py), computed in chunks (fused.py): for each row and depth a mixture of terms (terms.py) times a
weight. Drafts at anchors have weight 1 / share, so that the expected loss does not depend on the share. The depths after the first may
have anchors of their own (`Drafter.deeper_share`): they cost most of a step, and share the first one's weights.

The loss is a sum over depths and label tokens; the caller divides by the number of label tokens of the whole optimiser step
(`count_label_tokens`), over all processes and micro-batches. The result does not depend on packing, padding, accumulation or the
number of processes, since terms and weights depend on their own draft only.

A draft vocabulary restricts the backbone's distribution to tokens that can be drafted and does *not* renormalise it, so that alpha is
the true acceptance rate. A token outside it counts as wrong in the accuracy.

The weights of the depths decay geometrically, or are D-PACE's (2605.18810). The expected number of accepted tokens of a draft from t is
``sum_k prod_{i<=k} a_i``, with a_i the acceptance probability of depth i. Its derivative with respect to ``log a_k`` is
``sum_{j>=k} prod_{i<=j} a_i``: the weight, with a_i the draft's probability of the label, smoothed towards 1 and without gradient. It
needs all depths of a draft, so the readouts run an additional time before the loss, without gradients.

In a rollout the drafter continues its own tokens, as in decoding: on-policy distillation (2306.13649; for drafters 2310.08461,
2605.29343). The forward is `begin` and `step`, with gradients. No gradient flows through the choice of tokens, which are sampled with
noise derived from the anchor's key.

Shape suffixes: B batch, T positions, D width, K depth, V draft vocabulary, M rows of the loss or drafts, C rows of a chunk, R rows of a
prefill, N depths after the first (K - 1), in `expected` drafts.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Anchors, Features, anchors_by_row
from headstart.heads.base import Drafter
from headstart.heads.layers.causal_attention import draft_masks
from headstart.inference.engine.noise import gumbel
from headstart.support.errors import UserError
from headstart.support.pytree import map_tensors
from headstart.training.features.source import FeaturesWithCache
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import LossRows, SampledAnchors, StepKey, dense_rows, sample_anchors, text_rows
from headstart.training.objective.terms import FEATURES, at_least_fp32, in_vocabulary
from headstart.training.recipe.training import Objective

SMOOTHING = 0.5
"""a = SMOOTHING + (1 - SMOOTHING) q, so that depths after an unlikely one keep some weight (2605.18810)."""


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
    total, correct_K, alpha_K = loss.sum(replace(rows, weights_MK=weights_MK), drafts)
    return Sums(total, drawn_MK.sum(0), correct_K, alpha_K, torch.zeros_like(total), torch.zeros_like(total))


class TrainStep(nn.Module):
    """Forward and objective of one drafter. Raises UserError for a loss term that this drafter does not support."""

    def __init__(self, drafter: Drafter, settings: Objective, compiled: bool = False) -> None:
        super().__init__()
        if settings.terms.get(FEATURES):
            require_comparable(drafter)
        self.drafter, self.settings, self.compiled = drafter, settings, compiled

    def forward(self, features: Features, step_key: StepKey) -> Sums:
        """Draft from all positions, or from anchors sampled with ``step_key`` if the drafter's share is below 1."""
        loss, drafter, anchors, deeper = FusedLoss(self.settings, self.drafter, self.compiled), self.drafter, None, None
        if drafter.deeper_share < 1:
            deeper = sample_anchors(features, drafter.trained_depth, drafter.deeper_share, step_key, first_depth=1).at.ascending()
            hidden = drafter.forward_deeper(features, deeper)
        else:
            if drafter.anchor_share < 1:
                anchors = sample_anchors(features, drafter.trained_depth, drafter.anchor_share, step_key)
            hidden = drafter(features, None if anchors is None else anchors.at)
        targets = replace(features, hidden_BTD=features.hidden_BTD.detach())  # the teacher gets no gradients
        sums = objective(loss, targets, hidden, anchors, deeper)
        if not self.settings.on_policy:
            return sums
        assert isinstance(features, FeaturesWithCache)
        return sums._replace(loss=sums.loss + on_policy_loss(loss, features, step_key))


def require_comparable(drafter: Drafter) -> None:
    """Raise UserError unless the drafter's logits come from the backbone's output layer, as in EAGLE-1."""
    if not drafter.own_readout:
        return
    fault = f"{type(drafter).__name__} has a readout of its own, so its states mean something else"
    remedy = "leave that term out, or train a drafter read out by the backbone (EAGLE-1)"
    raise UserError(f"objective.terms.{FEATURES} compares a drafter's hidden states with the backbone's, but {fault}; {remedy}")


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


def rollout(loss: FusedLoss, features: Features, anchors: SampledAnchors) -> tuple[Tensor, list[Tensor]]:
    """Draft at the anchors; returns tokens, int64 ``[M, N]`` with N = K - 1, and each depth's hidden states ``[M, D]``, with gradients."""
    drafter, row_M = loss.drafter, anchors.at.row_M
    state = prefill_at(drafter, features, anchors)
    parents_M = features.tokens_BT[row_M, anchors.at.position_M + 1]
    root_M1, drafted, hidden = torch.zeros_like(parents_M[:, None]), [], []
    for k in range(drafter.trained_depth):
        if k == 0 or not drafter.all_depths_at_once:
            # A step writes in place to tensors that the gradients of `begin` or of the previous step need.
            before = map_tensors(lambda x: x.clone() if x.requires_grad else x, state)
            stepped_MND, state = drafter.step(before, parents_M[:, None], root_M1, k)
        hidden.append(stepped_MND[:, k if drafter.all_depths_at_once else 0])
        if k + 1 < drafter.trained_depth:
            parents_M = sample_tokens(loss, hidden[-1], k, parents_M, anchors.key_M)
            drafted.append(parents_M)
    return torch.stack(drafted, 1), hidden


def prefill_at(drafter: Drafter, features: Features, anchors: SampledAnchors) -> Any:
    """Return the drafter's state with one row per anchor, prefilled with its document up to the anchor and with capacity to draft.

    Each document is prefilled once, in pieces from anchor to anchor; the state after each piece is that anchor's.
    """
    state, states = None, []
    row_M, first_M, number_M = anchors.at.row_M, anchors.first_M, anchors.number_M
    end_M, document_M = anchors.at.position_M - first_M + 1, row_M * features.tokens_BT.shape[1] + first_M
    by_document_M, read_M = document_M.argsort(stable=True), torch.zeros_like(end_M)
    read_M[by_document_M[1:]] = end_M[by_document_M[:-1]]  # up to the previous anchor
    read_M[number_M == 0] = 0
    pieces = [(number_M == number).nonzero().flatten() for number in range(int(number_M.max()) + 1)]
    longest = max(int(read_M[now].max() + (end_M - read_M)[now].max()) for now in pieces)  # rows of a piece are padded to one length
    alive = document_M[pieces[0]]  # documents of the state's rows, ascending
    for now in pieces:
        rows, alive = torch.searchsorted(alive, document_M[now]), document_M[now]
        state = None if state is None else drafter.select(state, rows)
        piece = _piece(features, row_M[now], first_M[now] + read_M[now], (end_M - read_M)[now])
        state = drafter.reserve(drafter.begin(piece, state), longest + drafter.trained_depth)
        states.append(state)
    while len(states) > 1:  # in pairs, so that each is copied only a few times
        pairs = [states[i : i + 2] for i in range(0, len(states), 2)]
        states = [drafter.join(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return states[0]


def _piece(features: Features, row_R: Tensor, first_R: Tensor, count_R: Tensor) -> Features:
    """Select ``count_R`` positions from ``first_R`` of the rows ``row_R``."""
    place_RT = torch.arange(int(count_R.max()), device=row_R.device)[None]
    last = features.tokens_BT.shape[1] - 1
    index_RT, inside_RT = (first_R[:, None] + place_RT).clamp(max=last), place_RT < count_R[:, None]
    known = Features(features.tokens_BT, features.hidden_BTD, features.taps)
    return replace(map_tensors(lambda x: x[row_R[:, None], index_RT], known), document_BT=torch.where(inside_RT, 0, -1))


@torch.no_grad()
def sample_tokens(loss: FusedLoss, hidden_MD: Tensor, depth: int, parents_M: Tensor, key_M: Tensor) -> Tensor:
    """Sample a token from each draft's distribution at ``depth``, at ``objective.on_policy_temperature``: int64 ``[M]``."""
    vocabulary, temperature, chosen = loss.drafter.vocabulary, loss.settings.on_policy_temperature, []
    for chunk in loss.chunks(len(key_M)):
        logits_CV = at_least_fp32(loss.drafter.readout(hidden_MD[chunk], depth, parents_M[chunk]))
        if temperature:
            depth_C1 = torch.full_like(key_M[chunk, None], depth)
            logits_CV = logits_CV / temperature + gumbel(key_M[chunk], depth_C1, logits_CV.shape[-1])[:, 0]
        chosen.append(logits_CV.argmax(-1))
    chosen_M = torch.cat(chosen)
    return chosen_M if vocabulary is None else vocabulary[chosen_M]


def target_hidden(backbone: Backbone, features: FeaturesWithCache, at: Anchors, drafted_MN: Tensor) -> Tensor:
    """Return the backbone's final hidden states at the drafted tokens, ``[M, N, D]``, by one pass that continues the batch's KV cache.

    Here R is the drafts of a row, N the drafted tokens of a draft, and X those of a row (R N).
    """
    assert features.cache is not None and features.document_BT is not None
    B, N = len(features.tokens_BT), drafted_MN.shape[1]
    rank_M, anchor_BR = anchors_by_row(at, B)
    R = anchor_BR.shape[1]
    tokens_BRN = drafted_MN.new_zeros(B, R, N)
    tokens_BRN[at.row_M, rank_M] = drafted_MN
    positions_BX, attention_mask = draft_masks(features.document_BT, anchor_BR, N, backbone.windows)
    if backbone.max_positions is not None:  # tokens past the document's end have no weight
        positions_BX = positions_BX.clamp(max=backbone.max_positions - 1)
    kept = [(layer.keys, layer.values) for layer in features.cache.layers]
    try:
        hidden_BXD = backbone.read(tokens_BRN.flatten(1), features.cache, positions_BX, attention_mask).hidden_BTD
    finally:  # restore the cache for the next drafter
        for layer, (keys, values) in zip(features.cache.layers, kept, strict=True):
            layer.keys, layer.values = keys, values
    return hidden_BXD.unflatten(1, (R, N))[at.row_M, rank_M]
