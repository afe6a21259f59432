"""EAGLE (2401.15077; EAGLE-2, 2406.16858, is this head with dynamic trees): one decoder layer predicts the next hidden state.

The pairs of autoregressive.py, with the backbone's final hidden state as the state. The layer's output is the next hidden state, and is
read out by the backbone's output layer. One pass of training is the paper's; more train on the head's own states (HASS, 2408.15766). Names
are as vLLM and SGLang expect: the layer has no input norm, and no final norm follows it.

Shape suffixes: B batch, T positions, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn
from transformers import LlamaConfig

from headstart.heads.autoregressive import AutoregressiveDrafter
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features, pick
from headstart.heads.base import DrafterConfig
from headstart.heads.kv.cached_layers import CachedStack
from headstart.heads.layers.decoder_layer import OTHER_STREAM_SCALE, NoInputNormLayer, Rotary
from headstart.heads.layers.layer_config import LayerShape, engine_fields, llama_like
from headstart.heads.layers.start_values import layer_weights
from headstart.support.config import Depth, Size
from headstart.support.errors import UserError

BIAS = "fc.bias"
"""vLLM drops it, SGLang starts it at random where it is missing: a head without one stores zeros."""


class Eagle(AutoregressiveDrafter):
    """One layer over a projection of embedding and hidden state; the backbone's embedding and output layer."""

    class Config(DrafterConfig):
        depth: Depth = 1
        """Passes of training, each on the states of the one before: 1 as in the paper, more as in HASS (2408.15766)."""
        draft_depth: Depth | None = 5
        """Tokens beyond the root that it drafts when decoding (null: as many as it is trained for; adaptive trees up to twice as many)."""
        intermediate_size: Size | None = None
        """Width of the feed-forward part (null: the backbone's)."""
        feature_noise: Annotated[float, Ge(0)] = 0.0
        """Half the width of the uniform noise added to the hidden states in training; the paper's is 0.1 (0: none)."""
        bias: bool = False
        """Add a bias to the projection, as the paper's code does; vLLM drops it."""
        layer: LayerShape | None = None
        """Shape of the decoder layers (null: the backbone's); heads trained elsewhere may differ in it."""

    config: Config
    own_readout = False
    fixed_arguments = ("layer",)

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__(backbone, config)
        self.layer_config: LlamaConfig = llama_like(backbone, config.intermediate_size, config.layer)
        self.fc = nn.Linear(2 * backbone.dim, backbone.dim, bias=config.bias)
        layer = NoInputNormLayer(self.layer_config)
        self.layers = nn.ModuleList([layer])
        self.cached = CachedStack([layer], Rotary(self.layer_config))

    def init_from(self, backbone: Backbone) -> None:
        """Initialise the projection as the hidden state plus small random parts, and the layer as the backbone's last if shapes agree,
        but without effect: what that layer adds fits the residual stream before the final norm, which no norm follows here.
        """
        super().init_from(backbone)
        D, layer = backbone.dim, self.cached.layers[0].layer
        self.fc.weight *= OTHER_STREAM_SCALE
        self.fc.weight[:, D:] += torch.eye(D, device=self.fc.weight.device)
        if self.config.bias:
            self.fc.bias.zero_()
        if (last := layer_weights(backbone)) is not None:
            layer.start_as(last[0])
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()

    def states(self, features: Features, index_BT: Tensor | None = None) -> Tensor:
        hidden_BTD = features.hidden_BTD.to(self.fc.weight.dtype)
        return hidden_BTD if index_BT is None else pick(hidden_BTD, index_BT)

    def train_states(self, features: Features) -> Tensor:
        """Return the hidden states, with noise in training: a draft's own states are inexact too."""
        state_BTD, width = self.states(features), 2 * self.config.feature_noise
        return state_BTD + (torch.rand_like(state_BTD) - 0.5) * width if self.training and width else state_BTD

    def streams(self, embedded_BTD: Tensor, state_BTD: Tensor) -> tuple[Tensor]:
        return (self.fc(torch.cat([embedded_BTD.to(self.fc.weight.dtype), state_BTD.to(self.fc.weight.dtype)], -1)),)

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return self.backbone.readout(hidden.to(self.backbone.dtype))

    def engine_config(self) -> dict[str, Any]:
        """Return a configuration for vLLM, which takes the first architecture, and SGLang, which takes the second."""
        architectures = ["EagleLlamaForCausalLM", "LlamaForCausalLMEagle"]
        return engine_fields(self.layer_config, self.fc.weight.dtype) | {"architectures": architectures, "bias": self.config.bias}

    def tensors(self) -> dict[str, Tensor]:
        return {BIAS: self.fc.weight.new_zeros(self.fc.out_features)} | super().tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        bias = tensors.get(BIAS)
        if bias is not None and bool(bias.any()) and not self.config.bias:
            raise UserError(f"{BIAS} is not zero, but this head's fc has no bias: set drafter.bias=true, or fetch heads without one")
        super().load_tensors({name: tensor for name, tensor in tensors.items() if name != BIAS or self.config.bias})
