"""What a drafter is trained for: to say what the backbone would say, at every depth, without ever holding ``[T, V]`` logits.

The backbone's distribution at position j is that of ``x_{j+1}``. Depth k drafts ``x_{t+2+k}`` at position t, so the one
distribution at j teaches every depth k, at ``t = j-1-k``. The loss therefore runs over teacher positions j, in chunks: the
backbone's logits of a chunk once, then every depth's (fused.py). At each, a mixture of terms (terms.py) says how far the draft
is off, and a weight (depths.py) how much that matters at this depth.

The loss is a sum over depths and learned tokens; whoever calls it divides by the number of learned tokens of the whole
optimiser step (`count_learned`), over every process and accumulated micro-batch. That number is what makes the reduction
independent of packing, padding, accumulation and the number of processes; no term and no weight looks beyond its own draft.

A draft vocabulary restricts the backbone's distribution to what can be drafted, and does *not* renormalise it, so the overlap
is the true one. A token outside of it counts as wrong in the accuracy.

Shape suffixes: B batch, T positions, D width, K depth, M teacher positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.training.objective import depth_weights as depths
from headstart.training.objective.fused import Fused, LossRows
from headstart.training.objective.terms import FEATURES, wide

if TYPE_CHECKING:
    from headstart.training.recipe.recipe import Objective


class Sums(NamedTuple):
    """Sums over the learned tokens of a batch; per depth where the name ends in K. Sums of batches add up."""

    loss: Tensor
    count_K: Tensor
    """Positions at which a depth drafts a learned token."""
    correct_K: Tensor
    """Of them, where the draft's first choice is the backbone's: the chance of acceptance, given the tokens before."""
    overlap_K: Tensor
    """Sum of ``sum_v min(p_v, q_v)``, p and q at temperature 1."""


def objective(wanted: Objective, backbone: Backbone, drafter: Drafter, features: Features, hidden: list[Tensor]) -> Sums:
    """Sums over a batch, given what ``drafter(features)`` returned; only ``loss`` carries gradients."""
    fused = Fused(wanted, backbone, drafter)
    places, drafts, row_M, j_M = _places(features, hidden)
    dtype = wide(drafts[0][:0]).dtype
    if wanted.depth_weights == "geometric":
        weights_MK = depths.geometric(wanted.depth_decay, places.counts_MK, dtype)
    else:
        T = features.tokens_BT.shape[1]
        draft_MK = row_M[:, None] * T + j_M[:, None] - 1 - torch.arange(len(drafts), device=j_M.device)
        sure_MK = depths.confidence(fused, places, drafts).to(dtype)
        weights_MK = depths.expected(sure_MK, places.counts_MK, draft_MK, features.tokens_BT.numel())
    loss, correct_K, overlap_K = fused.sum(places._replace(weights_MK=weights_MK), drafts)
    return Sums(loss, places.counts_MK.sum(0), correct_K, overlap_K)


def counted(loss_mask_BT: Tensor, document_BT: Tensor, depth: int) -> Tensor:
    """bool ``[B, T-1]``: whether that depth drafts the token after teacher position j, so at position ``j-1-depth``.

    It must be one to learn, and the drafting position must lie in the same document.
    """
    back = depth + 2
    inside_BT = F.pad(document_BT[:, back:] == document_BT[:, :-back], (min(back, document_BT.shape[1]), 0))
    return (loss_mask_BT & inside_BT & (document_BT >= 0))[:, 1:]


def count_learned(loss_mask_BT: Tensor, document_BT: Tensor) -> Tensor:
    """Number of learned tokens: those that some depth drafts, and whatever depth k drafts depth 0 drafts too."""
    return counted(loss_mask_BT, document_BT, 0).sum()


def require_comparable(drafter: Drafter) -> None:
    """Raise UserError unless the drafter's hidden states are read out by the backbone's own output layer, as EAGLE-1's are."""
    if not drafter.own_readout:
        return
    raise UserError(
        f"objective.terms.{FEATURES} compares a drafter's hidden states with the backbone's, but {type(drafter).__name__} has a readout of "
        "its own, so its states mean something else; leave that term out, or train a drafter read out by the backbone (EAGLE-1)"
    )


def _places(features: Features, hidden: list[Tensor]) -> tuple[LossRows, list[Tensor], Tensor, Tensor]:
    """The M teacher positions that any depth learns from, each depth's hidden states that face them, and where they are (row, j).

    Where a depth does not count it gets some other position's state: a fixed shape is worth more than the few rows saved,
    and a depth that drafts nothing in a batch still takes part in the graph, which data parallelism needs.
    """
    assert features.loss_mask_BT is not None and features.document_BT is not None
    counts_KBT = torch.stack([counted(features.loss_mask_BT, features.document_BT, k) for k in range(len(hidden))])
    row_M, j_M = counts_KBT[0].nonzero(as_tuple=True)
    tokens_BT, counts_MK = features.tokens_BT, counts_KBT[:, row_M, j_M].T
    places = LossRows(features.hidden_BTD[row_M, j_M], tokens_BT[row_M, j_M], tokens_BT[row_M, j_M + 1], counts_MK, counts_MK)
    drafts = []
    for k, draft_BTD in enumerate(hidden):
        draft_BTD = draft_BTD if draft_BTD.shape[1] else F.pad(draft_BTD, (0, 0, 0, 1))
        drafts.append(draft_BTD[row_M, (j_M - 1 - k).clamp(min=0)])
    return places, drafts, row_M, j_M
