"""Acceptance on stored features, where the backbone is not here to decode: teacher-forced, by depth, as a chain.

A depth of a draft counts as accepted where all depths before it do and it agrees with the backbone: by the most likely token (greedy), or
by the expected acceptance rate ``sum_v min(p_v, q_v)``. The drafts continue the text, not the backbone's own choices, so on text that the
backbone did not write the figures differ from those of decoding.

Shape suffixes: M rows of the loss, K depth, N drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import LossRows, StepKey, dense_rows, sample_anchors, text_rows
from headstart.training.objective.terms import compare, soft_target


@torch.no_grad()
def acceptance(loss: FusedLoss, rows: Iterable[Features], sampled: bool, seed: int) -> dict[str, Any] | None:
    """Return ``teacher_forced_tau`` (the backbone's own token included) and ``teacher_forced_acceptance_per_depth`` over these features:
    the share of drafts whose token of a depth is accepted. None without drafts of label tokens.

    ``sampled``: by acceptance rates at temperature 1, else greedily.
    """
    depths = loss.drafter.trained_depth
    accepted_K, counted_K = torch.zeros(depths, dtype=torch.float64), torch.zeros(depths, dtype=torch.float64)
    for features in rows:
        for reached_NK, counts_NK in _chains(loss, features, sampled, seed):
            accepted_K += reached_NK.sum(0).double().cpu()
            counted_K += counts_NK.sum(0).double().cpu()
    if not counted_K[0]:
        return None
    shares = (accepted_K / counted_K.clamp(min=1)).tolist()
    return {"teacher_forced_tau": 1 + sum(shares), "teacher_forced_acceptance_per_depth": shares, "sampled": sampled}


def _chains(loss: FusedLoss, features: Features, sampled: bool, seed: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield by draft and depth how far the chain is accepted, and where it counts: ``[N, K]``."""
    drafter = loss.drafter
    if drafter.anchor_share < 1:
        anchors = sample_anchors(features, drafter.trained_depth, drafter.anchor_share, StepKey(seed, 0))
        if not len(anchors):
            return
        rows, drafts = text_rows(features, anchors), drafter(features, anchors.at)
        yield _agreement(loss, rows, drafts, sampled).cumprod(1) * rows.counts_MK, rows.counts_MK
        return
    rows, drafts, draft_MK = dense_rows(features, drafter(features, None))
    if not len(rows):
        return
    agree_MK, K, count = _agreement(loss, rows, drafts, sampled), len(drafts), features.tokens_BT.numel()
    index_MK = torch.where(rows.counts_MK, draft_MK, count) * K + torch.arange(K, device=draft_MK.device)
    agree_NK, counts_NK = agree_MK.new_zeros(2, (count + 1) * K).unbind()
    agree_NK.scatter_(0, index_MK.flatten(), (agree_MK * rows.counts_MK).flatten())
    counts_NK.scatter_(0, index_MK.flatten(), rows.counts_MK.to(agree_MK.dtype).flatten())
    counts_NK = counts_NK.view(-1, K).cumprod(1)  # a chain whose start is no label has none
    yield agree_NK.view(-1, K).cumprod(1) * counts_NK, counts_NK


def _agreement(loss: FusedLoss, rows: LossRows, drafts: list[Tensor], sampled: bool) -> Tensor:
    """Return by row and depth whether draft and backbone agree, or the acceptance rate: ``[M, K]``."""
    found_MK = torch.zeros(len(rows), len(drafts), device=rows.counts_MK.device)
    for chunk in loss.chunks(len(rows)):
        part = rows.part(chunk)
        for i, draft_MD in enumerate(drafts):
            if i < part.hidden_MJD.shape[1]:
                target = soft_target(loss.teacher.readout(part.hidden_MJD[:, i]), loss.vocabulary)
            draft = compare(target, loss.chunk_logits(draft_MD, i, chunk, part)[1])
            choice_C = draft.choice_C if loss.vocabulary is None else loss.vocabulary[draft.choice_C]
            found_MK[chunk, i] = draft.alpha_C.float() if sampled else (choice_C == target.choice_C).float()
    return found_MK
