"""EAGLE (2401.15077; EAGLE-2, 2406.16858, is this head with dynamic trees): one decoder layer predicts the next hidden state.

Heads that draft autoregressively in hidden states, EAGLE-3 (2503.01840) too, share `AutoregressiveDrafter`: position t takes the pair
(embedding of ``x_{t+1}``, the backbone's state of t). The layers' output drafts ``x_{t+2}`` and takes the place of the backbone's state in
the pair of the next depth. Training runs the ``depth`` passes at all positions at once (training-time test, 2503.01840; HASS, 2408.15766):
pass k attends to the keys of pass 0 up to t and to those of passes 1 to k at t.

EAGLE's state is the backbone's final hidden state, and its output is read out by the backbone's output layer. One pass of training is the
paper's; more train on the head's own states. Names are as vLLM and SGLang expect: the layer has no input norm, and there is no final norm.

Shape suffixes: B batch, T positions, D width, N tree nodes.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn
from transformers import LlamaConfig

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Anchors, Features, anchors_by_row, of_parents, pick
from headstart.heads.base import Drafter, DrafterConfig
from headstart.heads.layers.cached_layers import CachedStack, Pass
from headstart.heads.layers.causal_attention import Blocks, divide
from headstart.heads.layers.decoder_layer import OTHER_STREAM_SCALE, NoInputNormLayer, Rotary
from headstart.heads.layers.draft_cache import DraftCache, NodeSlots
from headstart.heads.layers.rows import RowState, drafted
from headstart.heads.layers.start_values import LayerShape, engine_fields, layer_weights, llama_like
from headstart.support.config import Depth, Size
from headstart.support.errors import UserError


@dataclass(frozen=True)
class State(RowState):
    """KV caches of the pairs, the backbone's state that awaits its next token, and the last drafted nodes."""

    caches: tuple[DraftCache, ...]
    pending_BD: Tensor
    hidden_BND: Tensor | None = drafted()
    """States that the nodes' children are paired with."""
    nodes: NodeSlots | None = drafted()


class AutoregressiveDrafter(Drafter):
    """Base class: subclasses say which states they start from, what the first layer reads of a pair, and which state goes on."""

    capturable = recomputable = True
    layer_config: LlamaConfig
    cached: CachedStack
    """The decoder layers."""

    @abstractmethod
    def states(self, features: Features, index_BT: Tensor | None = None) -> Tensor:
        """Return the backbone's states ``[B, T, D]`` to pair with tokens; at the positions ``index_BT`` of each row only if given."""

    @abstractmethod
    def streams(self, embedded_BTD: Tensor, state_BTD: Tensor) -> tuple[Tensor, ...]:
        """Return what the first layer reads of the pairs (`DecoderLayer.inputs`); the last is the residual stream."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens, by default as the backbone does."""
        return self.backbone.embed(tokens)

    def next_state(self, hidden: Tensor) -> Tensor:
        """Return the state that stands in for the backbone's at the next depth, from the layers' output ``[..., D]``."""
        return hidden

    # Training.

    def forward_dense(self, features: Features, place_BR: Tensor | None = None) -> list[Tensor]:
        """Return the output of every pass: the first at all positions, the others too or, if given, at ``place_BR``, ascending in a row."""
        T, state_BTD = features.tokens_BT.shape[1], self.train_states(features)
        if T < 3:
            return [state_BTD[:, :0] for _ in range(self.trained_depth)]
        embedded_BTD = self.embed(features.tokens_BT)
        shape = (len(state_BTD), self.layer_config.num_attention_heads, T - 2)
        blocks = divide(features.document_BT, shape, state_BTD.device, self.cached.window)
        passes: list[Pass] = []
        outputs = []
        for k in range(self.trained_depth):
            if k == 0 or place_BR is None:
                Tk = max(T - 2 - k, 0)
                token_BTD, state_BTD = embedded_BTD[:, k + 1 : k + 1 + Tk], state_BTD[:, :Tk]
            else:
                token_BTD = pick(embedded_BTD, (place_BR + k + 1).clamp(max=T - 1))
            if k == 1 and place_BR is not None:
                state_BTD, blocks = pick(state_BTD, place_BR), blocks.at(place_BR)
            output_BTD, keys_values = self.checkpointed(self._train_pass)(token_BTD, state_BTD, tuple(passes), blocks)
            passes.append(keys_values)
            outputs.append(output_BTD)
            state_BTD = self.next_state(output_BTD)
        return outputs

    def forward_deeper(self, features: Features, deeper: Anchors) -> list[Tensor]:
        rank_M, anchor_BR = anchors_by_row(deeper, len(features.tokens_BT))
        place_BR = anchor_BR.clamp(min=0).cummax(1).values  # rows with fewer repeat their last
        first_BTD, *later = self.forward_dense(features, place_BR)
        return [first_BTD, *(hidden_BRD[deeper.row_M, rank_M] for hidden_BRD in later)]

    def train_states(self, features: Features) -> Tensor:
        """Return the states that training starts from; by default those that decoding does."""
        return self.states(features)

    def _train_pass(self, embedded_BTD: Tensor, state_BTD: Tensor, passes: tuple[Pass, ...], blocks: Blocks) -> tuple[Tensor, Pass]:
        return self.cached.forward_train(self.streams(embedded_BTD, state_BTD), passes, blocks)

    # Decoding.

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        self.cached.limit(window, sink, offload)

    def begin(self, features: Features, state: State | None = None) -> State:
        """Extend the KV caches with pairs (token, the backbone's state of the position before it).

        The last state is kept until its token is known; a sequence's first token forms no pair.
        """
        counts_B = features.lengths_B
        last_B = (counts_B - 1).clamp(min=0)
        if state is None:
            caches, tokens_BT, new_B, shift = self.cached.empty(features.tokens_BT), features.tokens_BT[:, 1:], last_B, 0
        else:
            caches, tokens_BT, new_B, shift = state.caches, features.tokens_BT, counts_B, 1
        offsets_BT = self.cached.kept_offsets(caches, tokens_BT.shape[1], new_B)
        states_BTD = self.states(features, torch.cat([offsets_BT - shift, last_B[:, None]], 1).clamp(min=0))
        before_BTD, last_BD = states_BTD[:, :-1], states_BTD[:, -1]
        if state is None:
            last_BD = last_BD.contiguous()  # as later ones are: captures depend on strides
        else:
            before_BTD = torch.where((offsets_BT == 0)[..., None], state.pending_BD[:, None], before_BTD)
            last_BD = torch.where((counts_B > 0)[:, None], last_BD, state.pending_BD)
        streams = self.streams(self.embed(tokens_BT.gather(1, offsets_BT)), before_BTD)
        return State(self.cached.extend(caches, streams, offsets_BT, new_B), last_BD)

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        nodes = self.cached.nodes_below(state.caches, state.nodes if depth else None, parents_BN, depth)
        before_BND = of_parents(state.pending_BD[:, None], state.hidden_BND if depth else None, parents_BN)
        streams = self.streams(self.embed(tokens_BN), before_BND)
        hidden_BND, caches = self.cached.attend_nodes(state.caches, streams, nodes, depth)
        return hidden_BND, replace(state, caches=caches, hidden_BND=self.next_state(hidden_BND), nodes=nodes)


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
