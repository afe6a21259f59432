"""The loss of a backbone on held-out rows, with its adapter and without: what joint training costs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tqdm import tqdm

from headstart.heads.backbone.backbone import Backbone
from headstart.support.terminal import progress
from headstart.training.data.packing import collate
from headstart.training.data.sample import Sample
from headstart.training.features.source import LiveFeatures
from headstart.training.objective.lm_loss import lm_loss
from headstart.training.objective.loss_rows import count_label_tokens


def backbone_losses(backbone: Backbone, rows: Sequence[Sample], chunk: int) -> dict[str, float]:
    """Return the mean next-token cross-entropy over the rows' label tokens, ``backbone_loss``, and without the adapter
    ``backbone_loss_before``."""
    with progress("measuring the backbone's loss", "row", 2 * len(rows)) as bar:
        now = _mean(backbone, rows, chunk, bar)
        with backbone.without_adapter():
            return {"backbone_loss": now, "backbone_loss_before": _mean(backbone, rows, chunk, bar)}


@torch.no_grad()
def _mean(backbone: Backbone, rows: Sequence[Sample], chunk: int, bar: tqdm) -> float:
    source, total, count = LiveFeatures(backbone, ()), 0.0, 0
    for i in range(len(rows)):
        batch = collate(rows, [[i]]).to(backbone.device)
        total += lm_loss(backbone, source.read(batch), chunk).cross_entropy.item()
        count += int(count_label_tokens(batch.loss_mask_BT, batch.document_BT))
        bar.update()
    return total / max(count, 1)
