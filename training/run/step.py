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
from headstart.training.data.packing import Batch
from headstart.training.features.on_policy import FeaturesWithCache
from headstart.training.features.source import FeatureSource, Teacher
from headstart.training.objective.anchors import StepKey, sample_anchors
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.lm_loss import lm_loss
from headstart.training.objective.objective import Sums, objective, on_policy_loss, require_comparable
from headstart.training.objective.terms import FEATURES
from headstart.training.recipe.training import Objective


class TrainStep(nn.Module):
    """Forward and objective of one drafter; ``teacher`` computes the target logits from ``features.hidden_BTD``.

    Raises UserError for a loss term that this drafter does not support.
    """

    def __init__(self, teacher: Teacher, drafter: Drafter, settings: Objective) -> None:
        super().__init__()
        if settings.terms.get(FEATURES):
            require_comparable(drafter)
        self.drafter, self.teacher, self.settings = drafter, teacher, settings

    def forward(self, features: Features, step_key: StepKey) -> Sums:
        """Draft from all positions, or from anchors sampled with ``step_key`` if the drafter's `anchor_share` is below 1."""
        loss, drafter, anchors = FusedLoss(self.settings, self.teacher, self.drafter), self.drafter, None
        if drafter.anchor_share < 1:
            anchors = sample_anchors(features, drafter.trained_depth, drafter.anchor_share, step_key)
        hidden = drafter(features, None if anchors is None else anchors.at)
        targets = replace(features, hidden_BTD=features.hidden_BTD.detach())   # the teacher gets no gradients
        sums = objective(loss, targets, hidden, anchors)
        if not self.settings.on_policy:
            return sums
        assert isinstance(features, FeaturesWithCache)
        return sums._replace(loss=sums.loss + on_policy_loss(loss, features, step_key))


class JointStep(nn.Module):
    """`TrainStep` with a trained backbone adapter (Medusa-2, 2401.10774 section 2.2.2); takes a batch instead of its features.

    The loss is the heads' objective, whose gradients reach the adapter through the features, plus ``lm_weight`` times the backbone's
    next-token cross-entropy. The heads' teacher is the adapted backbone, detached.
    """

    def __init__(self, source: FeatureSource, drafter: Drafter, settings: Objective, lm_weight: float) -> None:
        super().__init__()
        self.source, self.backbone, self.lm_weight = source, drafter.backbone, lm_weight
        self.heads = TrainStep(source.teacher, drafter, settings)
        self.adapter = nn.ParameterList(self.backbone.trainable.values())

    def forward(self, batch: Batch, step_key: StepKey) -> Sums:
        with torch.autocast(batch.tokens_BT.device.type, enabled=False):   # in the backbone's own dtype, as in decoding
            features = self.source.read(batch)
            lm = lm_loss(self.backbone, features, self.heads.settings.chunk_size)
        sums = self.heads(features, step_key)
        return sums._replace(loss=sums.loss + self.lm_weight * lm, lm_loss=lm)
