"""Sampled anchors: the positions that a training step drafts from, if not from all.

A position is sampled by a hash of the seed, the step and the document up to it, so the sample does not depend on packing, padding,
micro-batches or the number of processes.

Shape suffixes: B batch, T positions, M anchors (ordered by index in the document, then by document), K depth, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.backbone.features import Anchors, Features
from headstart.heads.layers.causal_attention import document_positions
from headstart.inference.engine.noise import mix_, row_seeds
from headstart.training.objective.loss_rows import LossRows, counted_from


class StepKey(NamedTuple):
    """Key of a step's random numbers, which also depend on the tokens."""

    seed: int
    step: int


@dataclass(frozen=True)
class SampledAnchors:
    """Anchors sampled from the positions that draft label tokens."""

    at: Anchors
    share: float
    """Probability with which each position was sampled."""
    first_M: Tensor
    """Start of the anchor's document in its row."""
    number_M: Tensor
    """Index of the anchor among those of its document."""
    key_M: Tensor
    """Hash of the anchor, from which the noise of its rollout is derived."""
    counts_MK: Tensor
    """True where depth k drafts a label token."""

    def __len__(self) -> int:
        return len(self.key_M)


def sample_anchors(features: Features, depth: int, share: float, step_key: StepKey, first_depth: int = 0) -> SampledAnchors:
    """Sample, with probability ``share``, the positions where a depth from ``first_depth`` to ``depth - 1`` drafts a label token."""
    loss_mask_BT, document_BT, tokens_BT = features.loss_mask_BT, features.document_BT, features.tokens_BT
    assert loss_mask_BT is not None and document_BT is not None
    counts_BTK = counted_from(loss_mask_BT, document_BT, depth)
    position_BT = document_positions(document_BT)
    key_BT = _keys(tokens_BT, position_BT, step_key)
    uniform_BT = ((key_BT >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
    row_M, t_M = (counts_BTK[..., first_depth:].any(-1) & (uniform_BT < share)).nonzero(as_tuple=True)
    first_M = t_M - position_BT[row_M, t_M]
    number_M = number_within(row_M * tokens_BT.shape[1] + first_M)
    order_M = number_M.argsort(stable=True)
    row_M, t_M = row_M[order_M], t_M[order_M]
    return SampledAnchors(Anchors(row_M, t_M), share, first_M[order_M], number_M[order_M], key_BT[row_M, t_M], counts_BTK[row_M, t_M])


def _keys(tokens_BT: Tensor, position_BT: Tensor, step_key: StepKey) -> Tensor:
    """Hash the seed, the step and the document up to each position: int64 ``[B, T]``."""
    upto_BT = mix_(mix_(tokens_BT.clone()) + position_BT).cumsum(1)
    before_BT = F.pad(upto_BT, (1, 0)).gather(1, torch.arange(tokens_BT.shape[1], device=tokens_BT.device) - position_BT)
    drawn_1 = mix_(mix_(row_seeds([step_key.seed], 1, tokens_BT.device)) + step_key.step)
    return mix_(mix_(upto_BT - before_BT) ^ drawn_1)


def number_within(group_M: Tensor) -> Tensor:
    """Return each entry's index within its group; a group's entries must be adjacent."""
    _, inverse_M, counts = torch.unique_consecutive(group_M, return_inverse=True, return_counts=True)
    return torch.arange(len(group_M), device=group_M.device) - (counts.cumsum(0) - counts)[inverse_M]


def text_rows(features: Features, anchors: SampledAnchors) -> LossRows:
    """Make the loss rows of teacher-forced drafts at anchors, with one target per depth, at position ``t+1+k``."""
    row_M1, K, last = anchors.at.row_M[:, None], anchors.counts_MK.shape[1], features.tokens_BT.shape[1] - 1
    target_MK = anchors.at.position_M[:, None] + 1 + torch.arange(K, device=row_M1.device)
    here_MK, next_MK = target_MK.clamp(max=last), (target_MK + 1).clamp(max=last)  # no depth counts beyond the row
    tokens_BT = features.tokens_BT
    hidden_MKD, parents_MK, labels_MK = features.hidden_BTD[row_M1, here_MK], tokens_BT[row_M1, here_MK], tokens_BT[row_M1, next_MK]
    return LossRows(hidden_MKD, parents_MK, labels_MK, anchors.counts_MK, anchors.counts_MK).known(features, (row_M1, here_MK))
