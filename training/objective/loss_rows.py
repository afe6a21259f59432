"""The rows that the loss is summed over: which depths count, and the target of each.

The backbone's distribution at position j is that of ``x_{j+1}``, and depth k drafts ``x_{t+2+k}`` at position t. So the distribution
at j is the target of all depths k, drafted at ``t = j-1-k``. Drafts at all positions are therefore grouped by target position j
(`dense_rows`), so that each target is read out once; drafts at anchors are grouped by anchor, with one target per depth (`text_rows`).

Anchors are the positions that a step drafts from, if not from all. A position is sampled by a hash of the seed, the step and the document
up to it, so the sample does not depend on packing, padding, micro-batches or the number of processes.

`LmLoss` keeps a backbone a good language model while its adapter is trained together with heads.

Shape suffixes: B batch, T positions, D width, K depth, N depths after the first, M rows of the loss or label tokens or anchors (ordered by
index in the document, then by document), J targets of a row (1 or K), V vocabulary, C label tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Anchors, Features
from headstart.heads.backbone.hooks import recomputed
from headstart.heads.layers.causal_attention import chunk_policy, document_positions
from headstart.inference.engine.noise import mix_, row_seeds


def counted(loss_mask_BT: Tensor, document_BT: Tensor, depth: int) -> Tensor:
    """Return bool ``[B, T-1]``: True if ``depth`` drafts the token after target position j, from position ``j-1-depth``.

    The token must be a label, and the drafting position must be in the same document.
    """
    back = depth + 2
    inside_BT = F.pad(document_BT[:, back:] == document_BT[:, :-back], (min(back, document_BT.shape[1]), 0))
    return (loss_mask_BT & inside_BT & (document_BT >= 0))[:, 1:]


def count_label_tokens(loss_mask_BT: Tensor, document_BT: Tensor) -> Tensor:
    """Count the label tokens drafted by depth 0; deeper depths draft subsets of them."""
    return counted(loss_mask_BT, document_BT, 0).sum()


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
    by_depth = [counted(loss_mask_BT, document_BT, k)[:, 1 + k :] for k in range(depth)]
    # True if depth k drafts a label token at position t.
    counts_BTK = torch.stack([F.pad(count_BT, (0, document_BT.shape[1] - count_BT.shape[1])) for count_BT in by_depth], -1)
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


@dataclass(frozen=True)
class LossRows:
    """M rows of K drafted tokens each: one target for all depths (J = 1), or one per depth (J = K)."""

    hidden_MJD: Tensor
    """The backbone's final hidden states, whose readout is the target distribution."""
    parents_MJ: Tensor
    """Parent of the drafted token: the last token that the target is conditioned on."""
    labels_MJ: Tensor | None
    """The next token of the training sequence; None for rollouts."""
    counts_MK: Tensor
    """True where depth k counts in the row."""
    weights_MK: Tensor
    """Weight in the loss; 0 where the depth does not count."""
    first_depth: int = 0
    """Depth of column 0."""
    drawn_MK: Tensor | None = None
    """True where depth k counts and was drafted; None: wherever it counts."""
    norm_MJ: Tensor | None = None
    """Normaliser of the targets' logits, and their most likely tokens; None: not known yet."""
    choice_MJ: Tensor | None = None

    def __len__(self) -> int:
        return len(self.counts_MK)

    def drafted(self, chunk: slice, i: int) -> slice | Tensor:
        """Return the rows of a chunk that need the logits of column i; all of them if each has a draft."""
        return chunk if self.drawn_MK is None or i == 0 else self.drawn_MK[chunk, i].nonzero().flatten() + chunk.start

    def part(self, rows: slice | Tensor) -> LossRows:
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "first_depth"}
        return replace(self, **{name: tensor[rows] for name, tensor in tensors.items() if tensor is not None})

    def known(self, features: Features, at: tuple[Tensor, Tensor]) -> LossRows:
        """Return the rows with what the features know of the targets, which are ``at`` these rows and positions ``[M, J]``."""
        if features.norm_BT is None or features.choice_BT is None:
            return self
        return replace(self, norm_MJ=features.norm_BT[at], choice_MJ=features.choice_BT[at])


def dense_rows(features: Features, hidden: list[Tensor], deeper: Anchors | None = None) -> tuple[LossRows, list[Tensor], Tensor]:
    """Make the loss rows of drafts at all positions; returns rows, hidden states per depth, and each entry's draft ``b T + t``, ``[M, K]``.

    Where a depth does not count, its entry has another position's state: this keeps shapes fixed, and every depth is in the graph, as
    data parallelism requires. ``deeper``: the positions of all depths but the first (`Drafter.forward_deeper`).
    """
    assert features.loss_mask_BT is not None and features.document_BT is not None
    counts_KBT = torch.stack([counted(features.loss_mask_BT, features.document_BT, k) for k in range(len(hidden))])
    row_M, j_M = counts_KBT[0].nonzero(as_tuple=True)
    tokens_BT, counts_MK = features.tokens_BT, counts_KBT[:, row_M, j_M].T
    parents_M1, labels_M1 = tokens_BT[row_M, j_M][:, None], tokens_BT[row_M, j_M + 1][:, None]
    at = row_M[:, None], j_M[:, None]
    rows = LossRows(features.hidden_BTD[at], parents_M1, labels_M1, counts_MK, counts_MK).known(features, at)
    drafts = []
    for k, draft_BTD in enumerate(hidden[: None if deeper is None else 1]):
        draft_BTD = draft_BTD if draft_BTD.shape[1] else F.pad(draft_BTD, (0, 0, 0, 1))
        drafts.append(draft_BTD[row_M, (j_M - 1 - k).clamp(min=0)])
    if deeper is not None:
        number_BT = torch.full_like(tokens_BT, -1)
        number_BT[deeper.row_M, deeper.position_M] = torch.arange(len(deeper.row_M), device=j_M.device)
        number_MN = number_BT[row_M[:, None], (j_M[:, None] - 1 - torch.arange(1, len(hidden), device=j_M.device)).clamp(min=0)]
        rows = replace(rows, drawn_MK=counts_MK & F.pad(number_MN >= 0, (1, 0), value=True))
        drafts += [F.pad(draft_MD, (0, 0, 0, 1))[number_MN[:, n]] for n, draft_MD in enumerate(hidden[1:])]  # -1: the padding
    draft_MK = (row_M * tokens_BT.shape[1] + j_M - 1)[:, None] - torch.arange(len(hidden), device=j_M.device)
    return rows, drafts, draft_MK


def text_rows(features: Features, anchors: SampledAnchors) -> LossRows:
    """Make the loss rows of teacher-forced drafts at anchors, with one target per depth, at position ``t+1+k``."""
    row_M1, K, last = anchors.at.row_M[:, None], anchors.counts_MK.shape[1], features.tokens_BT.shape[1] - 1
    target_MK = anchors.at.position_M[:, None] + 1 + torch.arange(K, device=row_M1.device)
    here_MK, next_MK = target_MK.clamp(max=last), (target_MK + 1).clamp(max=last)  # no depth counts beyond the row
    tokens_BT = features.tokens_BT
    hidden_MKD, parents_MK, labels_MK = features.hidden_BTD[row_M1, here_MK], tokens_BT[row_M1, here_MK], tokens_BT[row_M1, next_MK]
    return LossRows(hidden_MKD, parents_MK, labels_MK, anchors.counts_MK, anchors.counts_MK).known(features, (row_M1, here_MK))


class LmLoss(NamedTuple):
    """Sums over the label tokens that depth 0 drafts, so that they have the divisor of the heads' objective."""

    cross_entropy: Tensor
    kl: Tensor
    """KL divergence of the backbone from the original one (``original_BTD``), 0 without."""


def lm_loss(backbone: Backbone, features: Features, chunk: int, original_BTD: Tensor | None = None) -> LmLoss:
    """Compare the backbone's next-token distributions with the label tokens and with those of ``original_BTD``.

    ``original_BTD`` are the final hidden states without the adapter (2401.10774 section 2.3.2). Logits are computed for ``chunk``
    positions at a time and recomputed in the backward.
    """
    assert features.loss_mask_BT is not None and features.document_BT is not None
    row_M, j_M = counted(features.loss_mask_BT, features.document_BT, 0).nonzero(as_tuple=True)
    hidden_MD, label_M = features.hidden_BTD[row_M, j_M], features.tokens_BT[row_M, j_M + 1]
    original_MD = None if original_BTD is None else original_BTD[row_M, j_M]
    cross_entropy = kl = hidden_MD.new_zeros((), dtype=hidden_MD.float().dtype)
    starts = list(range(0, max(len(label_M), 1), chunk))  # at least one, since data parallelism needs the adapter in every graph
    for start in chunk_policy().select(starts):
        rows = slice(start, start + chunk)
        original_CD = None if original_MD is None else original_MD[rows]
        both = recomputed(_losses, backbone, hidden_MD[rows], label_M[rows], original_CD)
        cross_entropy, kl = cross_entropy + both[0], kl + both[1]
    return LmLoss(cross_entropy, kl)


def _losses(backbone: Backbone, hidden_CD: Tensor, label_C: Tensor, original_CD: Tensor | None) -> tuple[Tensor, Tensor]:
    logq_CV = backbone.readout(hidden_CD).float().log_softmax(-1)
    cross_entropy = F.nll_loss(logq_CV, label_C, reduction="sum")
    if original_CD is None:
        return cross_entropy, torch.zeros_like(cross_entropy)
    with torch.no_grad():
        logp_CV = backbone.readout(original_CD).float().log_softmax(-1)
    return cross_entropy, F.kl_div(logq_CV, logp_CV, reduction="sum", log_target=True)
