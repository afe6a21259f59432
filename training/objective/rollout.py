"""Rollouts: from anchors, the drafter drafts autoregressively on its own tokens, as in decoding.

`Drafter.forward` is teacher-forced, but in decoding the drafter continues its own tokens; training on these is on-policy distillation
(2306.13649; for drafters 2310.08461, 2605.29343). The forward here is `begin` and `step`, as in decoding, with gradients. No gradient
flows through the choice of tokens, which are sampled with noise derived from the anchor's key.

Shape suffixes: B batch, T positions, M drafts, R rows of a prefill, N drafted tokens that have children (K - 1), K depth, D width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Anchors, Features, anchors_by_row
from headstart.heads.base import Drafter
from headstart.heads.layers.causal_attention import draft_masks
from headstart.inference.engine.noise import gumbel
from headstart.support.pytree import map_tensors
from headstart.training.features.on_policy import FeaturesWithCache
from headstart.training.objective.anchors import SampledAnchors
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.terms import at_least_fp32


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
