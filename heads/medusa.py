"""Medusa (2401.10774): independent heads; head k drafts k+2 tokens ahead from the last hidden state alone.

Each head is ``layers`` residual blocks ``x + silu(Wx + b)`` and a readout of its own. The blocks start as the identity and
the readouts as the backbone's, so an untrained head repeats the backbone's own guess.

Shape suffixes: B batch, T positions, D width, N tree nodes, K depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter, Features, require_count


class ResBlock(nn.Module):
    """``x + silu(Wx + b)``; W and b start at zero, so an untrained block is the identity."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class Medusa(Drafter):
    """``depth`` heads of ``layers`` residual blocks; reads nothing but the final hidden state."""

    captures = True
    file_name = "medusa_lm_head.safetensors"

    def __init__(self, backbone: Backbone, *, depth: int = 4, layers: int = 1) -> None:
        super().__init__(backbone)
        require_count("depth", depth)
        require_count("layers", layers)
        self.arguments = {"depth": depth, "layers": layers}
        self.depth, self.layers = depth, layers
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(backbone.dim) for _ in range(layers)), nn.Linear(backbone.dim, backbone.vocab, bias=False))
            for _ in range(depth)
        )
        for head in self._heads:
            head[-1].weight.data.copy_(backbone.unembed.weight)

    @property
    def _heads(self) -> list[Any]:
        """Each a sequence: residual blocks, then the readout."""
        return list(self.heads)

    def forward(self, features: Features) -> list[Tensor]:
        T = features.tokens_BT.shape[1]
        hidden = features.hidden_BTD.to(self._heads[0][-1].weight.dtype)
        return [head[:-1](hidden[:, : max(T - 2 - k, 0)]) for k, head in enumerate(self._heads)]

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return self._heads[depth][-1](hidden)

    def begin(self, features: Features, state: Tensor | None = None) -> Tensor:
        """The state is the hidden state ``[B, 1, D]`` of each row's last position."""
        hidden_BTD = features.hidden_BTD.to(self._heads[0][-1].weight.dtype)
        lengths_B = features.lengths_B
        last_B11 = (lengths_B - 1).clamp(min=0)[:, None, None]
        last_B1D = hidden_BTD.gather(1, last_B11.expand(-1, 1, hidden_BTD.shape[-1]))
        return last_B1D if state is None else torch.where(lengths_B[:, None, None] > 0, last_B1D, state)

    def step(self, state: Tensor, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return self._heads[depth][:-1](state), state

    def config(self) -> dict[str, Any]:
        """No ``architectures``: one engine that reads this layout refuses files that name one."""
        backbone = self.backbone[0]
        return {
            "medusa_num_heads": self.depth,
            "medusa_num_layers": self.layers,
            "medusa_fc_bias": True,
            "base_model_name_or_path": backbone.name,
            "hidden_size": backbone.dim,
            "vocab_size": backbone.vocab,
        }

    def tensors(self) -> dict[str, Tensor]:
        return {name.removeprefix("heads."): tensor for name, tensor in self.state_dict().items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.load_state_dict({f"heads.{name}": tensor for name, tensor in tensors.items()}, strict=True)
