"""EAGLE-1 (2401.15077) as a user of the project would write it: one decoder layer regresses the backbone's next hidden state.

Trained one step ahead, it drafts several by feeding its own output back. Shape suffixes: B batch, T positions, D width, N tree nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter, DrafterConfig
from headstart.heads.kv.cached_layers import CachedLayer
from headstart.heads.kv.draft_cache import DraftCache, NodeSlots
from headstart.heads.kv.rows import RowState, drafted
from headstart.heads.layers.causal_attention import divide
from headstart.heads.layers.decoder_layer import DecoderLayer, Rotary
from headstart.heads.layers.layer_config import llama_like
from headstart.heads.layers.start_values import layer_weights


@dataclass(frozen=True)
class State(RowState):
    cache: DraftCache
    pending_BD: Tensor
    """The last hidden state, waiting for the token after it."""
    hidden_BND: Tensor | None = drafted()
    nodes: NodeSlots | None = drafted()


class Eagle1(Drafter):
    class Config(DrafterConfig):
        depth: Annotated[int, Ge(1)] = 1
        draft_depth: Annotated[int, Ge(1)] | None = 3

    own_readout = False
    capturable = True

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__(backbone, config)
        self.layer_config = llama_like(backbone, None)
        self.fc = nn.Linear(2 * backbone.dim, backbone.dim, bias=False)
        self.layer = DecoderLayer(self.layer_config)
        self.cached = CachedLayer(self.layer, Rotary(self.layer_config))

    def init_from(self, backbone: Backbone) -> None:
        super().init_from(backbone)
        if (last := layer_weights(backbone)) is not None:
            self.layer.start_as(last[0])

    def _mixed(self, tokens_BT: Tensor, state_BTD: Tensor) -> Tensor:
        return self.fc(torch.cat([self.backbone.embed(tokens_BT).to(self.fc.weight.dtype), state_BTD.to(self.fc.weight.dtype)], -1))

    def forward_dense(self, features: Features) -> list[Tensor]:
        (B, T), state_BTD, passes, states = features.tokens_BT.shape, features.hidden_BTD, [], []
        if T < 3:
            return [features.hidden_BTD[:, :0].to(self.fc.weight.dtype) for _ in range(self.trained_depth)]
        blocks = divide(features.document_BT, (B, self.layer_config.num_attention_heads, T - 2), state_BTD.device)
        for k in range(self.trained_depth):
            Tk = max(T - 2 - k, 0)
            x_BTD = self._mixed(features.tokens_BT[:, k + 1 : k + 1 + Tk], state_BTD[:, :Tk])
            state_BTD, keys_values = self.layer.forward_train((x_BTD,), tuple(passes), self.cached.rotary, blocks)
            passes.append(keys_values)
            states.append(state_BTD)
        return states

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return self.backbone.readout(hidden.to(self.backbone.dtype))

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        self.cached.limit(window, sink, offload)

    def begin(self, features: Features, state: State | None = None) -> State:
        hidden_BTD, counts_B = features.hidden_BTD, features.lengths_B
        last_BD = hidden_BTD[torch.arange(len(counts_B), device=counts_B.device), (counts_B - 1).clamp(min=0)]
        if state is None:  # a sequence's first token follows no hidden state
            cache, tokens_BT, before_BTD, new_B = self.cached.empty(features.tokens_BT), features.tokens_BT[:, 1:], hidden_BTD, counts_B - 1
        else:
            cache, tokens_BT, new_B = state.cache, features.tokens_BT, counts_B
            before_BTD = torch.cat([state.pending_BD[:, None], hidden_BTD], 1)
            last_BD = torch.where((counts_B > 0)[:, None], last_BD, state.pending_BD)
        offsets_BT = self.cached.kept_offsets(cache, tokens_BT.shape[1], new_B)
        before_BTD = before_BTD.gather(1, offsets_BT[..., None].expand(-1, -1, before_BTD.shape[-1]))
        x_BTD = self.layer.inputs(self._mixed(tokens_BT.gather(1, offsets_BT), before_BTD))
        return State(self.cached.extend(cache, x_BTD, offsets_BT, new_B), last_BD)

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        nodes = self.cached.nodes_below(state.cache, state.nodes if depth else None, parents_BN, depth)
        before_BND = state.pending_BD[:, None].expand(-1, tokens_BN.shape[1], -1)
        if depth and state.hidden_BND is not None:
            before_BND = state.hidden_BND.gather(1, parents_BN[..., None].expand(-1, -1, state.hidden_BND.shape[-1]))
        mixed_BND = self._mixed(tokens_BN, before_BND)
        hidden_BND, cache = self.cached.attend_nodes(state.cache, self.layer.inputs(mixed_BND), mixed_BND, nodes, depth)
        return hidden_BND, replace(state, cache=cache, hidden_BND=hidden_BND, nodes=nodes)

    def engine_config(self) -> dict[str, Any]:
        return {"architectures": ["EagleModel"], "hidden_size": self.backbone.dim, "vocab_size": self.backbone.vocab}
