"""From the features of a batch to its summed loss: the drafter's forward, then the objective.

The training loop wraps this module for data parallelism and autocast. The backbone is no `nn.Module` and so no part of it: its
weights are neither synchronised, nor saved, nor cast. It is read by a `FeatureSource`, outside of autocast.
"""

from __future__ import annotations

from torch import nn

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.training.features.on_policy import FeaturesWithCache
from headstart.training.features.source import Teacher
from headstart.training.objective.anchors import StepKey, sample_anchors
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.objective import Sums, objective, on_policy_loss, require_comparable
from headstart.training.objective.terms import FEATURES
from headstart.training.recipe.training import Objective


class TrainStep(nn.Module):
    """``teacher`` gives the logits of ``features.hidden_BTD``.

    Raises UserError for a loss term that this drafter cannot be trained with.
    """

    def __init__(self, teacher: Teacher, drafter: Drafter, settings: Objective) -> None:
        super().__init__()
        if settings.terms.get(FEATURES):
            require_comparable(drafter)
        self.drafter, self.teacher, self.settings = drafter, teacher, settings

    def forward(self, features: Features, step_key: StepKey) -> Sums:
        """Drafts from every position, or from anchors drawn by ``step_key`` and the text if the drafter trains at a share of them."""
        loss, drafter, anchors = FusedLoss(self.settings, self.teacher, self.drafter), self.drafter, None
        if drafter.anchor_share < 1:
            anchors = sample_anchors(features, drafter.trained_depth, drafter.anchor_share, step_key)
        hidden = drafter(features, None if anchors is None else anchors.at)
        sums = objective(loss, features, hidden, anchors)
        if not self.settings.on_policy:
            return sums
        assert isinstance(features, FeaturesWithCache)
        return sums._replace(loss=sums.loss + on_policy_loss(loss, features, step_key))
