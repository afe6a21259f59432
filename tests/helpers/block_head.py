"""A parallel head as a user of the project would write one: it drafts all depths in one step, trains at sampled anchors, and corrects each
depth by its parent token.

Shape suffixes: B batch, M anchors, D width, K depth.
"""

import torch
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Anchors, Features, dense_from_anchors
from headstart.heads.base import Drafter, DrafterConfig


class BlockHead(Drafter):
    class Config(DrafterConfig):
        depth: int = 3

    all_depths_at_once = capturable = True
    anchor_share = 0.4

    def __init__(self, backbone: Backbone, config: DrafterConfig) -> None:
        super().__init__(backbone, config)
        D = backbone.dim
        self.queries = nn.Parameter(torch.empty(config.depth, D))
        self.block = nn.Linear(2 * D, D)
        self.correction = nn.Embedding(backbone.vocab, D)
        self.lm_head = nn.Linear(D, backbone.vocab)

    @property
    def max_depth(self) -> int | None:
        return self.trained_depth

    def init_from(self, backbone: Backbone) -> None:
        super().init_from(backbone)
        nn.init.normal_(self.queries, std=0.5)

    def all_depths(self, hidden_MD: Tensor, roots_M: Tensor) -> Tensor:
        root_MD = self.backbone.embed(roots_M).to(self.queries.dtype)
        return (self.block(torch.cat([hidden_MD.to(self.queries.dtype), root_MD], -1))[:, None] + self.queries).tanh()

    def forward(self, features: Features, at: Anchors | None = None) -> list[Tensor]:
        if at is None:
            return dense_from_anchors(lambda anchors: self.forward(features, anchors), features.tokens_BT)
        root_M = (at.position_M + 1).clamp(max=features.tokens_BT.shape[1] - 1)
        hidden_MKD = self.all_depths(features.hidden_BTD[at.row_M, at.position_M], features.tokens_BT[at.row_M, root_M])
        return list(hidden_MKD.unbind(1))

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        assert parent_tokens is not None
        return self.lm_head(hidden + self.correction(parent_tokens))

    def begin(self, features: Features, state: Tensor | None = None) -> Tensor:
        last_B = features.lengths_B - 1
        last_BD = features.hidden_BTD[torch.arange(len(last_B)), last_B.clamp(min=0)]
        return last_BD if state is None else torch.where((last_B >= 0)[:, None], last_BD, state)

    def step(self, state: Tensor, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return self.all_depths(state, tokens_BN[:, 0]), state

    def engine_config(self) -> dict[str, object]:
        return {"model_type": "block_head"}
