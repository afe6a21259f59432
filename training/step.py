"""From a batch of tokens to its summed loss: the frozen backbone reads, the drafter drafts, the objective compares.

The one module the training loop wraps for data parallelism and autocast. The backbone is no `nn.Module` and so no part of
it: its weights are neither synchronised, nor saved, nor cast.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from headstart.heads.backbone import Backbone
from headstart.heads.base import Drafter, Features
from headstart.training.objective import Sums, objective
from headstart.training.recipe import Objective


class TrainStep(nn.Module):
    def __init__(self, backbone: Backbone, drafter: Drafter, wanted: Objective) -> None:
        super().__init__()
        self.drafter = drafter
        self.backbone = backbone
        self.wanted = wanted

    def forward(self, tokens_BT: Tensor, learn_BT: Tensor, document_BT: Tensor) -> Sums:
        features = self.read(tokens_BT, learn_BT, document_BT)
        return objective(self.wanted, self.backbone, self.drafter, features, self.drafter(features))

    @torch.no_grad()
    def read(self, tokens_BT: Tensor, learn_BT: Tensor, document_BT: Tensor) -> Features:
        """The backbone's features, in the backbone's own dtype, as when decoding. A row is one document, padded on the right."""
        with torch.autocast(tokens_BT.device.type, enabled=False):
            features = self.backbone.read(tokens_BT, taps=self.drafter.taps)
        return replace(features, learn_BT=learn_BT, document_BT=document_BT)
