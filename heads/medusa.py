"""Medusa (2401.10774): independent heads; head k drafts ``x_{t+2+k}`` from the final hidden state of position t alone.

Each head is ``layers`` residual blocks ``x + silu(Wx + b)`` and its own output layer. The blocks start as the identity and
the output layers as the backbone's, so an untrained head gives the backbone's next-token distribution.

Shape suffixes: B batch, T positions, D width, N tree nodes, K depth, X input width.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.own_readout import OwnReadoutConfig, OwnReadoutDrafter
from headstart.support.config import Depth, Layers


class ResBlock(nn.Module):
    """``x + silu(Wx + b)``; with an input of another width, ``Vx + c + silu(Wx + b)``."""

    def __init__(self, dim: int, width: int | None = None) -> None:
        """``width`` is that of the input; None: ``dim``."""
        super().__init__()
        self.linear = nn.Linear(width or dim, dim)
        self.res_connection = nn.Identity() if width is None else nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + nn.functional.silu(self.linear(x))

    @torch.no_grad()
    def start_as_identity(self) -> None:
        """Return the input's first D entries until it is trained."""
        for weight in self.parameters():
            weight.zero_()
        if isinstance(self.res_connection, nn.Linear):
            self.res_connection.weight.diagonal().fill_(1.0)


class Medusa(OwnReadoutDrafter):
    """`trained_depth` heads over the final hidden state of the last position."""

    class Config(OwnReadoutConfig):
        depth: Depth = 4
        """Number of heads: tokens drafted beyond the root."""
        layers: Layers = 1
        """Residual blocks of each head."""

    config: Config
    sequential = deepens = False
    all_depths_at_once = True
    capturable = True
    file_name = "medusa_lm_head.safetensors"

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__(backbone, config)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(backbone.dim) for _ in range(config.layers)), nn.Linear(backbone.dim, self.draft_vocab, bias=False))
            for _ in range(config.depth)
        )

    def output_layers(self) -> list[nn.Linear]:
        return [head[-1] for head in self._heads]

    def init_from(self, backbone: Backbone) -> None:
        super().init_from(backbone)
        for block in self.modules():
            if isinstance(block, ResBlock):
                block.start_as_identity()

    @property
    def _heads(self) -> list[Any]:
        """The heads; each is a sequence of residual blocks and the output layer."""
        return list(self.heads)

    def forward_dense(self, features: Features) -> list[Tensor]:
        T = features.tokens_BT.shape[1]
        hidden = features.hidden_BTD.to(self._heads[0][-1].weight.dtype)
        return [head[:-1](hidden[:, : max(T - 2 - k, 0)]) for k, head in enumerate(self._heads)]

    def begin(self, features: Features, state: Tensor | None = None) -> Tensor:
        """Return the hidden state ``[B, 1, D]`` of each row's last position."""
        return features.newer(features.last_B1D.to(self._heads[0][-1].weight.dtype), state)

    def step(self, state: Tensor, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return torch.cat([head[:-1](state) for head in self._heads], 1), state

    def engine_config(self) -> dict[str, Any]:
        """Return the configuration without ``architectures``, since one engine rejects Medusa files that have it."""
        return {
            "medusa_num_heads": self.config.depth,
            "medusa_num_layers": self.config.layers,
            "medusa_fc_bias": True,
            "base_model_name_or_path": self.backbone.name,
            "hidden_size": self.backbone.dim,
            "vocab_size": self.backbone.vocab,
            **({} if self.vocabulary is None else {"draft_vocab_size": self.draft_vocab}),
        }

    def tensors(self) -> dict[str, Tensor]:
        return {name.removeprefix("heads."): tensor for name, tensor in self.state_dict().items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors({name if name in ("d2t", "t2d") else f"heads.{name}": tensor for name, tensor in tensors.items()})
