"""The training step as a module: from features or a batch to the summed loss, wrapped for data parallelism and autocast.

A frozen backbone is not part of the module (`Backbone` is not an `nn.Module`): its features are computed once for all drafters, outside
autocast. A trainable backbone runs inside it, so that data parallelism sees its adapter.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.training.data.batches import Batch
from headstart.training.features.source import FeatureSource, FeaturesWithCache, LiveFeatures
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import LmLoss, StepKey, lm_loss, sample_anchors
from headstart.training.objective.objective import Sums, objective, on_policy_loss, require_comparable
from headstart.training.objective.terms import FEATURES
from headstart.training.recipe.sections import Lora
from headstart.training.recipe.training import Objective


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


class JointStep(nn.Module):
    """`TrainStep` with a trained backbone adapter (Medusa-2, 2401.10774 section 2.2.2); takes a batch instead of its features.

    The loss is ``rise`` times the heads' objective, whose gradients reach the adapter through the features, plus ``lm_weight`` times the
    backbone's next-token cross-entropy and ``kl_weight`` times its KL divergence from the original backbone. The heads' teacher is the
    adapted backbone, detached. At a rise of 0 the heads are trained alone.
    """

    def __init__(self, source: FeatureSource, drafter: Drafter, settings: Objective, lora: Lora, compiled: bool = False) -> None:
        super().__init__()
        self.source, self.backbone, self.lora = source, drafter.backbone, lora
        self.original = LiveFeatures(self.backbone, ()) if lora.kl_weight else None
        self.heads = TrainStep(drafter, settings, compiled)
        self.adapter = nn.ParameterList(self.backbone.trainable.values())

    def forward(self, batch: Batch, step_key: StepKey, rise: float) -> Sums:
        features, lm = self._read(batch, rise > 0)
        sums = self.heads(features, step_key)
        if lm is None:  # data parallelism needs the adapter in every graph
            return sums._replace(loss=sums.loss + 0.0 * torch.stack([weight.sum() for weight in self.adapter]).sum())
        kept = self.lora.lm_weight * lm.cross_entropy + self.lora.kl_weight * lm.kl
        return sums._replace(loss=rise * sums.loss + kept, lm_loss=lm.cross_entropy, lm_kl=lm.kl)

    def _read(self, batch: Batch, joint: bool) -> tuple[Features, LmLoss | None]:
        """Run the backbone in its own dtype, as in decoding: with gradients and its own losses if ``joint``."""
        with torch.autocast(batch.tokens_BT.device.type, enabled=False), torch.set_grad_enabled(joint and torch.is_grad_enabled()):
            original_BTD = None
            if joint and self.original is not None:
                with torch.no_grad(), self.backbone.without_adapter():
                    original_BTD = self.original.read(batch).hidden_BTD
            features = self.source.read(batch)
            return features, lm_loss(self.backbone, features, self.heads.settings.chunk_size, original_BTD) if joint else None


def recompute(drafter: Drafter) -> None:
    """Enable gradient checkpointing of the drafter and of a trained backbone, beside which a drafter may do without. Raises UserError."""
    drafter.backbone.recomputing = bool(drafter.backbone.trainable)
    try:
        drafter.recompute()
    except UserError:
        if not drafter.backbone.recomputing:
            raise
