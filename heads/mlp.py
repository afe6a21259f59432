"""MLP speculator (2404.19124): a recurrent state over the tokens since the last hidden state, with an output layer per depth.

The state starts as the backbone's last hidden state; depth k mixes it with an embedding of its parent token and drafts from the result:

    state <- gelu(norm(a * proj_k(state) + b * emb_k(token)))        logits = head_k(state)

with a = 0.5 ** (0.5 / K), so that the hidden state still makes up half of the state at the last of K depths, and
b = sqrt((1 - a ** 2) * I / 2). The norm is an RMSNorm with a bias. Names and arithmetic are those of IBM's fms-extras and of the
engines that load its checkpoints (``speculator.emb.0.weight`` and so on; with ``tie_weights`` all depths share one set of weights,
but for the first projection).

Shape suffixes: B batch, T positions, D width, I inner width, N tree nodes, K depths.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features, of_parents
from headstart.heads.layers.rows import RowState, drafted
from headstart.heads.own_readout import OwnReadoutConfig, OwnReadoutDrafter, at_depth
from headstart.support.config import Depth, Size
from headstart.support.errors import UserError

PREFIX = "speculator."
"""Prefix of the weights' names in IBM's checkpoints."""
EPS = 1e-6


@dataclass(frozen=True)
class State(RowState):
    """The last hidden state of each row, and the states of the last drafted nodes."""

    last_B1D: Tensor
    nodes_BNI: Tensor | None = drafted()


class BiasedNorm(nn.Module):
    """RMSNorm with a bias, computed in the dtype of its weights, even under autocast."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, EPS) + self.bias


class MLPSpeculator(OwnReadoutDrafter):
    """`trained_depth` steps of a recurrent state of width ``inner_dim``."""

    class Config(OwnReadoutConfig):
        depth: Depth = 4
        """Tokens drafted beyond the root, each with weights of its own unless they are tied."""
        inner_dim: Size | None = None
        """Width of the recurrent state (null: the backbone's)."""
        tie_weights: bool = False
        """All depths share one embedding, norm and output layer, and the later ones one projection."""
        scale_input: bool = True
        """Scale the backbone's hidden state to the size ``1 / sqrt(2)`` first."""

    config: Config
    capturable = True
    deepens = False

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__(backbone, config)
        K, D, inner = config.depth, backbone.dim, config.inner_dim or backbone.dim
        if config.tie_weights and K < 2:
            raise UserError(f"drafter.tie_weights shares weights between depths, which takes a drafter.depth of at least 2; got {K}")
        sets = 1 if config.tie_weights else K
        self.emb = nn.ModuleList(nn.Embedding(backbone.vocab, inner) for _ in range(sets))
        self.proj = nn.ModuleList(nn.Linear(inner if k else D, inner, bias=False) for k in range(2 if config.tie_weights else K))
        self.ln = nn.ModuleList(BiasedNorm(inner) for _ in range(sets))
        self.head = nn.ModuleList(nn.Linear(inner, self.draft_vocab, bias=False) for _ in range(sets))
        self.inner_dim = self.width = inner
        self.state_weight = 0.5 ** (0.5 / K)
        self.emb_weight = math.sqrt((1 - self.state_weight**2) * inner / 2)

    def output_layers(self) -> list[nn.Linear]:
        """Return the output layers if they have the width of the backbone's, so that they can start as it; none otherwise."""
        return [head for head in self.head if isinstance(head, nn.Linear) and head.in_features == self.backbone.dim]

    def init_from(self, backbone: Backbone) -> None:
        """Initialise embeddings and output layers as the backbone's if ``inner_dim`` is its width; all else as IBM does.

        Embeddings are scaled to the size of a random start, for which ``emb_weight`` is made.
        """
        super().init_from(backbone)
        for layer in (*self.emb, *self.proj, *(head for head in self.head if head not in self.output_layers())):
            nn.init.trunc_normal_(layer.weight, std=self.inner_dim**-0.5)
        if self.inner_dim == backbone.dim:
            table_VD = backbone.embed.weight[: backbone.vocab].float()
            size = table_VD.square().mean().sqrt().clamp(min=1e-6) * self.inner_dim**0.5
            for emb in self.emb:
                emb.get_parameter("weight").copy_(table_VD / size)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def _scaled(self, hidden_BTD: Tensor) -> Tensor:
        """The backbone's hidden states as the recurrent state before depth 0."""
        hidden_BTD = hidden_BTD.to(self._dtype)
        return F.rms_norm(hidden_BTD, hidden_BTD.shape[-1:], eps=EPS) * 0.5**0.5 if self.config.scale_input else hidden_BTD

    def _next(self, before: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """The states ``[..., I]`` after the parent tokens of that depth."""
        emb, proj, ln = (at_depth(modules, depth) for modules in (self.emb, self.proj, self.ln))
        return F.gelu(ln(self.state_weight * proj(before) + self.emb_weight * emb(tokens)))

    def forward_dense(self, features: Features) -> list[Tensor]:
        T, states = features.tokens_BT.shape[1], []
        state = self._scaled(features.hidden_BTD)
        for k in range(self.trained_depth):
            Tk = max(T - 2 - k, 0)
            state = self._next(state[:, :Tk], features.tokens_BT[:, k + 1 : k + 1 + Tk], k)
            states.append(state)
        return states

    def readouts(self) -> list[nn.Linear]:
        return [head for head in self.head if isinstance(head, nn.Linear)]

    def begin(self, features: Features, state: State | None = None) -> State:
        return State(features.newer(self._scaled(features.last_B1D), None if state is None else state.last_B1D))

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        before = of_parents(state.last_B1D, state.nodes_BNI if depth else None, parents_BN)
        nodes_BNI = self._next(before, tokens_BN, depth)
        return nodes_BNI, replace(state, nodes_BNI=nodes_BNI)

    def engine_config(self) -> dict[str, Any]:
        """Return the configuration of IBM's speculators."""
        K = self.config.depth
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "base_model_name_or_path": self.backbone.name,
            "n_predict": K,
            "emb_dim": self.backbone.dim,
            "inner_dim": self.inner_dim,
            "vocab_size": self.backbone.vocab,
            "tie_weights": self.config.tie_weights,
            "scale_input": self.config.scale_input,
            "top_k_tokens_per_head": [max(5 - k, 1) for k in range(K)],
            "n_candidates": 5,
            **({} if self.vocabulary is None else {"draft_vocab_size": self.draft_vocab}),
        }

    def tensors(self) -> dict[str, Tensor]:
        return {name if name in ("d2t", "t2d") else PREFIX + name: tensor for name, tensor in self.state_dict().items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors({name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})
