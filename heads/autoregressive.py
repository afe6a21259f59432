"""Heads that draft autoregressively in hidden states, as EAGLE (2401.15077) and EAGLE-3 (2503.01840).

Position t takes the pair (embedding of ``x_{t+1}``, the backbone's state of t). The layers' output drafts ``x_{t+2}`` and takes the place
of the backbone's state in the pair of the next depth. Training runs the ``depth`` passes at all positions at once (training-time test,
2503.01840; HASS, 2408.15766): pass k attends to the keys of pass 0 up to t and to those of passes 1 to k at t.

Shape suffixes: B batch, T positions, D width, N tree nodes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import LlamaConfig

from headstart.heads.backbone.features import Features, of_parents
from headstart.heads.base import Drafter
from headstart.heads.kv.cached_layers import CachedStack, Pass
from headstart.heads.kv.draft_cache import DraftCache, NodeSlots
from headstart.heads.kv.rows import RowState, drafted
from headstart.heads.layers.causal_attention import Blocks, divide


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

    def next_state(self, hidden: Tensor) -> Tensor:
        """Return the state that stands in for the backbone's at the next depth, from the layers' output ``[..., D]``."""
        return hidden

    # Training.

    def forward_dense(self, features: Features) -> list[Tensor]:
        T, state_BTD = features.tokens_BT.shape[1], self.train_states(features)
        if T < 3:
            return [state_BTD[:, :0] for _ in range(self.trained_depth)]
        embedded_BTD = self.backbone.embed(features.tokens_BT)
        shape = (len(state_BTD), self.layer_config.num_attention_heads, T - 2)
        blocks = divide(features.document_BT, shape, state_BTD.device, self.cached.window)
        passes: list[Pass] = []
        outputs = []
        for k in range(self.trained_depth):
            Tk = max(T - 2 - k, 0)
            inputs = (embedded_BTD[:, k + 1 : k + 1 + Tk], state_BTD[:, :Tk], tuple(passes), blocks)
            output_BTD, keys_values = self.checkpointed(self._train_pass)(*inputs)
            passes.append(keys_values)
            outputs.append(output_BTD)
            state_BTD = self.next_state(output_BTD)
        return outputs

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
        streams = self.streams(self.backbone.embed(tokens_BT.gather(1, offsets_BT)), before_BTD)
        return State(self.cached.extend(caches, streams, offsets_BT, new_B), last_BD)

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        nodes = self.cached.nodes_below(state.caches, state.nodes if depth else None, parents_BN, depth)
        before_BND = of_parents(state.pending_BD[:, None], state.hidden_BND if depth else None, parents_BN)
        streams = self.streams(self.backbone.embed(tokens_BN), before_BND)
        hidden_BND, caches = self.cached.attend_nodes(state.caches, streams, nodes, depth)
        return hidden_BND, replace(state, caches=caches, hidden_BND=self.next_state(hidden_BND), nodes=nodes)
