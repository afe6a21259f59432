"""A head to start from: one linear layer over a hidden state and the token after it, fed back for each depth (after 2401.10774).

`headstart check-head` says whether what you make of it keeps the contract. Shape suffixes: B batch, T positions, D width, N nodes.
"""

from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter, DrafterConfig


class MyHead(Drafter):
    class Config(DrafterConfig):
        """Arguments in a recipe, beside the depths."""

        depth: Annotated[int, Ge(1)] = 3
        bias: bool = True

    capturable = True  # begin and step are functions of tensors alone, without branches on their values

    def __init__(self, backbone: Backbone, config: Config) -> None:
        """Shapes only: weights are NaN until `init_from` or a checkpoint sets them."""
        super().__init__(backbone, config)
        self.mix = nn.Linear(2 * backbone.dim, backbone.dim, bias=config.bias)
        self.lm_head = nn.Linear(backbone.dim, backbone.vocab, bias=False)

    def init_from(self, backbone: Backbone) -> None:
        """Start values: the output layer is a copy of the backbone's."""
        super().init_from(backbone)
        self.lm_head.weight.copy_(backbone.unembed.weight)

    def advance(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The next hidden state: of the last one, and of the token that was chosen there."""
        embedded = self.backbone.embed(tokens).to(hidden.dtype)
        return hidden + self.mix(torch.cat([hidden, embedded], -1)).tanh()

    def forward_dense(self, features: Features) -> list[Tensor]:
        """Training: hidden states ``[B, T-2-k, D]`` of depth k, whose position t drafts token t+2+k."""
        states, hidden_BTD = [], features.hidden_BTD.to(self.mix.weight.dtype)
        for k in range(self.trained_depth):
            length = max(features.tokens_BT.shape[1] - 2 - k, 0)
            hidden_BTD = self.advance(hidden_BTD[:, :length], features.tokens_BT[:, 1 + k : 1 + k + length])
            states.append(hidden_BTD)
        return states

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def begin(self, features: Features, state: Tensor | None = None) -> Tensor:
        """Decoding: the state ``[B, 1, D]`` is the hidden state of each row's last token; a row without new tokens keeps its own."""
        last_B = features.lengths_B - 1
        rows_B = torch.arange(len(last_B), device=last_B.device)
        last_B1D = features.hidden_BTD[rows_B, last_B.clamp(min=0)][:, None].to(self.mix.weight.dtype)
        return last_B1D if state is None else torch.where((last_B >= 0)[:, None, None], last_B1D, state[:, :1])

    def step(self, state: Tensor, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Hidden states of the nodes of one depth; behind its first entry the state keeps them for the nodes below."""
        if depth == 0:
            parents_BND = state[:, :1].expand(-1, tokens_BN.shape[1], -1)
        else:
            parents_BND = state[:, 1:].gather(1, parents_BN[..., None].expand(-1, -1, state.shape[-1]))
        hidden_BND = self.advance(parents_BND, tokens_BN)
        return hidden_BND, torch.cat([state[:, :1], hidden_BND], 1)

    def engine_config(self) -> dict[str, Any]:
        """The ``config.json`` of the checkpoint; no serving engine reads this one."""
        return {"model_type": "my_head"}
