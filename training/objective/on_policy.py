"""What a drafter visits when it drafts by itself: its own proposals behind some positions of the text, and the backbone's word on each.

`Drafter.forward` steps every depth with the text's tokens. When it decodes, a depth is stepped with the proposals of those before it,
most of which stand in no text; learning on what the learner itself writes is on-policy distillation (2306.13649; for drafters
2310.08461, 2605.29343). Here a draft begins at some of the learned positions t: depth 0 is given the text's root ``x_{t+1}`` and every
further depth what the one before has guessed, drawn from its distribution by noise that is a function of the seed, the step and the
document up to t. `begin` and `step`, which decode, are the forward, with gradients; none goes through the choice of a token. The
backbone then reads the proposals of a batch in one pass behind the text that it has read (`FeaturesWithCache`): each sees
its document up to the root, and the proposals before it. What it says teaches depths from 1 on, by the objective's own terms; depth 0 is
given nothing but text.

A draft counts as often as it is rare: it weighs ``on_policy / on_policy_share``, so that the expected loss does not depend on the
share. Where depth k would not learn from the text (objective.py), because its token lies behind the document's end, say, it does not here.

Shape suffixes: B batch, T positions, M drafts (by their number in the document, then by document), R drafts of a row, N proposals of a
draft, K depth, D width, X proposals of a row (R N).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.inference.engine.noise import gumbel, mix, row_seeds
from headstart.support.nest import map_tensors
from headstart.training.data.packing import restarting
from headstart.training.objective.depth_weights import geometric
from headstart.training.objective.fused import Fused, Ledger, LossRows
from headstart.training.objective.objective import counted
from headstart.training.objective.terms import teach, wide
from headstart.training.recipe.recipe import Objective


@dataclass(frozen=True)
class FeaturesWithCache(Features):
    """With what the backbone needs to read on behind any of the positions."""

    cache: DynamicCache | None = None
    """Its keys and values of all positions, in every layer."""


class StepKey(NamedTuple):
    """What chance is made of, beside the text."""

    seed: int
    step: int


@dataclass(frozen=True)
class Anchors:
    """Where drafts begin."""

    row_M: Tensor
    place_M: Tensor
    """t, in its row."""
    position_M: Tensor
    """t, in its document."""
    key_M: Tensor
    """What is drawn for a draft is a function of this."""
    number_M: Tensor
    """Of the draft among those of its document, from 0."""
    counts_MK: Tensor
    """Whether depth k of it learns."""


def starts(features: Features, depth: int, share: float, step_key: StepKey) -> Anchors:
    """About that share of the positions from which a depth beyond the first learns, whatever lies beside a document."""
    loss_mask_BT, document_BT, tokens_BT = features.loss_mask_BT, features.document_BT, features.tokens_BT
    assert loss_mask_BT is not None and document_BT is not None
    T = tokens_BT.shape[1]
    by_depth = [counted(loss_mask_BT, document_BT, k)[:, 1 + k :] for k in range(depth)]   # by t, not by the teacher's position
    counts_BTK = torch.stack([F.pad(one, (0, T - one.shape[1])) for one in by_depth], -1)
    position_BT = restarting(document_BT)
    key_BT = _keys(tokens_BT, position_BT, step_key)
    uniform_BT = ((key_BT >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
    row_M, place_M = (counts_BTK[..., 1:].any(-1) & (uniform_BT < share)).nonzero(as_tuple=True)
    number_M = _numbers(row_M * T + place_M - position_BT[row_M, place_M])
    order_M = number_M.argsort(stable=True)
    row_M, place_M = row_M[order_M], place_M[order_M]
    return Anchors(row_M, place_M, position_BT[row_M, place_M], key_BT[row_M, place_M], number_M[order_M], counts_BTK[row_M, place_M])


def _keys(tokens_BT: Tensor, position_BT: Tensor, step_key: StepKey) -> Tensor:
    """int64 ``[B, T]``: a hash of the seed, the step, and the document up to each position."""
    upto_BT = mix(mix(tokens_BT) + position_BT).cumsum(1)
    before_BT = F.pad(upto_BT, (1, 0)).gather(1, torch.arange(tokens_BT.shape[1], device=tokens_BT.device) - position_BT)
    drawn_1 = mix(mix(row_seeds([step_key.seed], 1, tokens_BT.device)) + step_key.step)
    return mix(mix(upto_BT - before_BT) ^ drawn_1)


def _numbers(group_M: Tensor) -> Tensor:
    """Of each entry among those of its group; a group's entries stand together."""
    _, inverse_M, counts = torch.unique_consecutive(group_M, return_inverse=True, return_counts=True)
    return torch.arange(len(group_M), device=group_M.device) - (counts.cumsum(0) - counts)[inverse_M]


def prefill_at(drafter: Drafter, features: Features, at: Anchors) -> Any:
    """The drafter's state of every draft, each a row: it has taken in its document up to t, and has room to draft.

    A document is taken in once, in pieces from draft to draft; of the state behind each piece a copy goes on.
    """
    state, states = None, []
    end_M, first_M = at.position_M + 1, at.place_M - at.position_M
    document_M = at.row_M * features.tokens_BT.shape[1] + first_M
    by_document_M, taken_M = document_M.argsort(stable=True), torch.zeros_like(end_M)
    taken_M[by_document_M[1:]] = end_M[by_document_M[:-1]]   # up to where the draft before it began
    taken_M[at.number_M == 0] = 0
    pieces = [(at.number_M == number).nonzero().flatten() for number in range(int(at.number_M.max()) + 1)]
    longest = max(int(taken_M[now].max() + (end_M - taken_M)[now].max()) for now in pieces)   # rows of a piece are padded to one length
    alive = document_M[pieces[0]]   # the documents that the state has rows of, ascending
    for now in pieces:
        rows, alive = torch.searchsorted(alive, document_M[now]), document_M[now]
        state = None if state is None else drafter.select(state, rows)
        piece = _piece(features, at.row_M[now], first_M[now] + taken_M[now], (end_M - taken_M)[now])
        state = drafter.reserve(drafter.begin(piece, state), longest + drafter.trained_depth)
        states.append(state)
    while len(states) > 1:   # two and two, so that each is copied but a few times
        pairs = [states[i : i + 2] for i in range(0, len(states), 2)]
        states = [drafter.join(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return states[0]


def _piece(features: Features, row_R: Tensor, from_R: Tensor, count_R: Tensor) -> Features:
    """``count_R`` positions of those rows, from ``from_R`` on."""
    place_RT = torch.arange(int(count_R.max()), device=row_R.device)[None]
    last = features.tokens_BT.shape[1] - 1
    index_RT, there_RT = (from_R[:, None] + place_RT).clamp(max=last), place_RT < count_R[:, None]
    known = Features(features.tokens_BT, features.hidden_BTD, features.taps)
    return replace(map_tensors(lambda x: x[row_R[:, None], index_RT], known), document_BT=torch.where(there_RT, 0, -1))


def walk(drafter: Drafter, features: Features, at: Anchors, wanted: Objective) -> tuple[Tensor, list[Tensor]]:
    """Draft: int64 ``[M, N]`` proposals, N = K - 1, and for each depth the drafter's hidden states ``[M, D]``, with gradients."""
    state = prefill_at(drafter, features, at)
    tokens_M1 = features.tokens_BT[at.row_M, at.place_M + 1][:, None]
    parents_M1, proposals, hidden = torch.zeros_like(tokens_M1), [], []
    for k in range(drafter.trained_depth):
        # A step writes where the last one's keys lie, which its gradients still need.
        given = state if k == 0 else map_tensors(lambda x: x.clone() if x.requires_grad else x, state)
        hidden_M1D, state = drafter.step(given, tokens_M1, parents_M1, k)
        hidden.append(hidden_M1D[:, 0])
        if k + 1 < drafter.trained_depth:
            tokens_M1 = choose(drafter, hidden[-1], (k, tokens_M1[:, 0], at.key_M), wanted)[:, None]
            proposals.append(tokens_M1)
    return torch.cat(proposals, 1), hidden


@torch.no_grad()
def choose(drafter: Drafter, hidden_MD: Tensor, given: tuple[int, Tensor, Tensor], wanted: Objective) -> Tensor:
    """int64 ``[M]``: a token of each draft's own distribution at a depth, after its parents (``given``: depth, parents, keys)."""
    depth, parents_M, key_M = given
    vocabulary, found = drafter.vocabulary, []
    for rows in Fused(wanted, drafter.backbone, drafter).chunks(len(key_M)):
        logits_CV = wide(drafter.readout(hidden_MD[rows], depth, parents_M[rows]))
        if wanted.on_policy_temperature:
            place_C1 = torch.full_like(key_M[rows, None], depth)
            logits_CV = logits_CV / wanted.on_policy_temperature + gumbel(key_M[rows], place_C1, logits_CV.shape[-1])[:, 0]
        found.append(logits_CV.argmax(-1))
    chosen_M = torch.cat(found)
    return chosen_M if vocabulary is None else vocabulary[chosen_M]


def target_hidden(backbone: Backbone, features: FeaturesWithCache, at: Anchors, guesses_MN: Tensor) -> Tensor:
    """The backbone's final hidden states at the proposals, ``[M, N, D]``, read in one pass behind the text."""
    B, N = len(features.tokens_BT), guesses_MN.shape[1]
    rank_M = torch.zeros_like(at.row_M)
    by_row_M = at.row_M.argsort(stable=True)
    rank_M[by_row_M] = _numbers(at.row_M[by_row_M])
    R = int(rank_M.max()) + 1
    tokens_BRN = guesses_MN.new_zeros(B, R, N)
    tokens_BRN[at.row_M, rank_M] = guesses_MN
    place_BR = guesses_MN.new_full((B, R), -2)   # of what is no draft: it sees no text
    place_BR[at.row_M, rank_M] = at.place_M
    positions_BX, attention_mask = _masks(features, place_BR, N, backbone.windows)
    if backbone.max_positions is not None:   # a guess behind the document's end teaches nothing
        positions_BX = positions_BX.clamp(max=backbone.max_positions - 1)
    assert features.cache is not None
    kept = [(layer.keys, layer.values) for layer in features.cache.layers]
    try:
        hidden_BXD = backbone.read(tokens_BRN.flatten(1), features.cache, positions_BX, attention_mask).hidden_BTD
    finally:   # the next head reads behind the text as well
        for layer, (keys, values) in zip(features.cache.layers, kept, strict=True):
            layer.keys, layer.values = keys, values
    return hidden_BXD.unflatten(1, (R, N))[at.row_M, rank_M]


def _masks(features: Features, place_BR: Tensor, count: int, windows: dict[str, int | None]) -> tuple[Tensor, dict[str, Tensor]]:
    """Positions of the proposals in their documents, ``[B, X]``, and for each kind of layer where they look: text, then proposals."""
    assert features.document_BT is not None
    (B, R), T = place_BR.shape, features.tokens_BT.shape[1]
    ahead_N, place_T = (torch.arange(n, device=place_BR.device) for n in (count, T))
    position_BT, at_BR = restarting(features.document_BT), place_BR.clamp(min=0)
    position_BRN = position_BT.gather(1, at_BR)[..., None] + 2 + ahead_N
    same_BRT = features.document_BT.gather(1, at_BR)[..., None] == features.document_BT[:, None]
    text_BRT = same_BRT & (place_T <= place_BR[..., None] + 1)
    back_NN = ahead_N[:, None] - ahead_N
    alone_RR = torch.eye(R, dtype=torch.bool, device=place_BR.device)
    attention_mask = {}
    for kind, window in windows.items():
        text_BRNT, own_NN = text_BRT[:, :, None].expand(-1, -1, count, -1), back_NN >= 0
        if window is not None:
            text_BRNT = text_BRNT & (position_BRN[..., None] - position_BT[:, None, None] < window)
            own_NN = own_NN & (back_NN < window)
        own_XX = (alone_RR[:, None, :, None] & own_NN[:, None]).reshape(R * count, R * count)
        attention_mask[kind] = torch.cat([text_BRNT.flatten(1, 2), own_XX.expand(B, -1, -1)], -1)
    return position_BRN.flatten(1), attention_mask


class Along(Fused):
    """The objective where every depth has a teacher of its own: ``hidden_MD`` is ``[M, N, D]`` and ``given_M`` ``[M, N]``."""

    def read(self, draft_MD: Tensor, k: int, rows: slice, given_C: Tensor) -> tuple[Tensor, Tensor]:
        return super().read(draft_MD, k + 1, rows, given_C)

    def _chunk(self, places: LossRows, rows: slice, ledger: Ledger) -> tuple[Tensor, Tensor, Tensor]:
        sums = []
        for k in range(len(ledger.drafts)):
            own = places._replace(hidden_MD=places.hidden_MD[:, k], given_M=places.given_M[:, k])
            with torch.no_grad(), torch.autocast(own.given_M.device.type, enabled=False):
                teacher = teach(self.backbone.readout(own.hidden_MD), self.vocabulary)
            sums.append(self._depth(k, teacher, own, rows, ledger))
        losses_K, correct_K, overlap_K = (torch.stack(part) for part in zip(*sums, strict=True))
        return losses_K.sum(), correct_K, overlap_K


def on_policy_loss(wanted: Objective, backbone: Backbone, drafter: Drafter, features: FeaturesWithCache, step_key: StepKey) -> Tensor:
    """Weighted loss of a batch's drafts, to be divided by the learned tokens of the step as the text's is; 0 where there are none.

    Drafting is in the weights' own dtype, as `begin` and `step` are not made for autocast.
    """
    at = starts(features, drafter.trained_depth, wanted.on_policy_share, step_key)
    if not len(at.row_M):
        return features.hidden_BTD.new_zeros((), dtype=torch.float32)
    with torch.autocast(features.tokens_BT.device.type, enabled=False):
        guesses_MN, hidden = walk(drafter, features, at, wanted)
        hidden_MND = target_hidden(backbone, features, at, guesses_MN)
    counts_MN = at.counts_MK[:, 1:]
    weights_MN = geometric(wanted.depth_decay, at.counts_MK, wide(hidden[0][:0]).dtype)[:, 1:] * (wanted.on_policy / wanted.on_policy_share)
    places = LossRows(hidden_MND, guesses_MN, guesses_MN[:, 0], counts_MN, weights_MN)
    return Along(wanted, backbone, drafter).sum(places, hidden[1:])[0]
