"""The losses that keep a backbone a good language model while its adapter is trained together with heads.

Shape suffixes: B batch, T positions, D width, V vocabulary, M label tokens, C label tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.recompute import recomputed
from headstart.heads.layers.causal_attention import chunk_policy
from headstart.training.objective.loss_rows import counted


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
