"""The backbone's language modelling loss, for training its adapter together with heads.

Shape suffixes: B batch, T positions, D width, V vocabulary, M label tokens, C label tokens of a chunk.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.training.objective.loss_rows import counted


def lm_loss(backbone: Backbone, features: Features, chunk: int) -> Tensor:
    """Sum the backbone's next-token cross-entropy over the label tokens that depth 0 drafts, so that both losses have the same divisor.

    Logits are computed for ``chunk`` positions at a time and recomputed in the backward.
    """
    assert features.loss_mask_BT is not None and features.document_BT is not None
    counted_BT = counted(features.loss_mask_BT, features.document_BT, 0)
    hidden_MD, label_M = features.hidden_BTD[:, :-1][counted_BT], features.tokens_BT[:, 1:][counted_BT]
    total = hidden_MD.new_zeros((), dtype=hidden_MD.float().dtype)
    for start in range(0, max(len(label_M), 1), chunk):   # at least once, since data parallelism needs the adapter in every graph
        rows = slice(start, start + chunk)
        total = total + checkpoint(
            _cross_entropy, backbone, hidden_MD[rows], label_M[rows], use_reentrant=False, preserve_rng_state=False
        )
    return total


def _cross_entropy(backbone: Backbone, hidden_CD: Tensor, label_C: Tensor) -> Tensor:
    return F.cross_entropy(backbone.readout(hidden_CD).float(), label_C, reduction="sum")
