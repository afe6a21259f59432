"""From what the backbone knows of a batch to its summed loss: the drafter drafts, the objective compares.

The one module the training loop wraps for data parallelism and autocast. The backbone is no `nn.Module` and so no part of
it: its weights are neither synchronised, nor saved, nor cast. Its reading is a `FeatureSource`'s business, outside of autocast.
"""

from __future__ import annotations

from torch import nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.training.objective.objective import Sums, objective, require_comparable
from headstart.training.objective.on_policy import FeaturesWithCache, StepKey, on_policy_loss
from headstart.training.objective.terms import FEATURES
from headstart.training.recipe.recipe import Objective


class TrainStep(nn.Module):
    """``backbone`` teaches: the objective asks it for the logits of ``features.hidden_BTD``.

    Raises UserError for a term of the objective that this drafter cannot learn by.
    """

    def __init__(self, backbone: Backbone, drafter: Drafter, wanted: Objective) -> None:
        super().__init__()
        if wanted.terms.get(FEATURES):
            require_comparable(drafter)
        self.drafter = drafter
        self.backbone = backbone
        self.wanted = wanted

    def forward(self, features: Features, step_key: StepKey | None = None) -> Sums:
        """``step_key`` is what drafts of its own are drawn by, where the objective has them; None: the text alone."""
        sums = objective(self.wanted, self.backbone, self.drafter, features, self.drafter(features))
        if step_key is None or not self.wanted.on_policy:
            return sums
        assert isinstance(features, FeaturesWithCache)
        return sums._replace(loss=sums.loss + on_policy_loss(self.wanted, self.backbone, self.drafter, features, step_key))
