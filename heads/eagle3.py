"""EAGLE-3 (2503.01840): one decoder layer over fused hidden states of three backbone layers, trained on its own outputs.

In the first pass, position t takes the pair (embedding of ``x_{t+1}``, fused taps of t). Its output drafts ``x_{t+2}`` and, before
the norm, replaces the fused taps at the next depth. The training-time test runs the ``depth`` passes at all positions at once: pass k
attends to the keys of pass 0 up to t and to those of passes 1 to k at t. Names, norm order and the state fed back are as
serving engines expect (``norm_before_residual`` false).

Shape suffixes: B batch, T positions, S keys, D width, H heads, N tree nodes, M drafted nodes so far, K depth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.backbone.layer_weights import layer_weights
from headstart.heads.layers.cached_layer import CachedLayer
from headstart.heads.layers.causal_attention import divide
from headstart.heads.layers.decoder_layer import Norm, PairLayer, Rotary, engine_fields, llama_like
from headstart.heads.layers.draft_cache import DraftCache
from headstart.heads.layers.row_state import RowState, drafted
from headstart.heads.layers.tree_mask import extend_ancestors
from headstart.heads.own_readout import OwnReadoutConfig, OwnReadoutDrafter
from headstart.support.errors import UserError


@dataclass(frozen=True)
class State(RowState):
    """KV cache of the pairs, the fused state that awaits its next token, and the last drafted nodes."""

    cache: DraftCache
    pending_BD: Tensor
    hidden_BND: Tensor | None = drafted()
    ancestors_BNM: Tensor | None = drafted()


class Eagle3(OwnReadoutDrafter):
    """One layer, applied once per depth to its own output."""

    class Config(OwnReadoutConfig):
        depth: Annotated[int, Ge(1)] = 5
        """Passes of the training-time test: tokens drafted beyond the root."""
        taps: tuple[int, ...] | None = None
        """Layers whose residual stream is read, counted from 0, the embedding (null: ``(2, L//2, L-3)``)."""
        intermediate_size: Annotated[int, Ge(1)] | None = None
        """Width of the feed-forward part (null: the backbone's)."""

    config: Config
    reads_hidden = False
    capturable = True
    recomputing = False

    def __init__(self, backbone: Backbone, config: Config) -> None:
        taps = _taps(config.taps, backbone.num_layers)
        super().__init__(backbone, config.model_copy(update={"taps": taps}))
        self.taps = taps
        self.layer_config: LlamaConfig = llama_like(backbone, config.intermediate_size)
        D = backbone.dim
        self.fc = nn.Linear(len(self.taps) * D, D, bias=False)
        self.midlayer = PairLayer(self.layer_config)
        self.norm = Norm(D, eps=self.layer_config.rms_norm_eps)
        self.lm_head = nn.Linear(D, self.draft_vocab, bias=False)
        self.cached = CachedLayer(self.midlayer, Rotary(self.layer_config))

    def output_layers(self) -> list[nn.Linear]:
        return [self.lm_head]

    def init_from(self, backbone: Backbone) -> None:
        """Initialise the fused state as the deepest tap plus small random parts of all taps, each scaled to unit size; the layer as
        the backbone's last if the shapes agree; and the output layer as the backbone's.

        Without the scaling, residual streams, whose entries are in the tens, would dominate the layer's initial output.
        """
        super().init_from(backbone)
        D = self.fc.out_features
        tokens_1T = torch.linspace(0, backbone.vocab - 1, min(64, backbone.max_positions or 64), device=backbone.device).long()[None]
        taps = backbone.read(tokens_1T, taps=self.taps).taps or {}
        self.fc.weight[:, -D:] += torch.eye(D)
        for i, tap in enumerate(self.taps):
            size = taps[tap].float().square().mean(-1).sqrt().median()  # median over positions: the first is often an outlier
            self.fc.weight[:, i * D : (i + 1) * D] /= size.clamp(min=1e-6).item()
        if (last := layer_weights(backbone)) is not None and self.midlayer.start_as(last[0]):
            self.norm.weight.copy_(last[1])

    def fuse(self, features: Features, index_BT: Tensor | None = None) -> Tensor:
        """Concatenate and project the tapped layers: ``[B, T, D]``, at the positions ``index_BT`` of each row only if given."""
        assert features.taps is not None
        taps_BTX = torch.cat([features.taps[tap] for tap in self.taps], -1)
        if index_BT is not None:
            taps_BTX = taps_BTX.gather(1, index_BT[..., None].expand(-1, -1, taps_BTX.shape[-1]))
        return self.fc(taps_BTX.to(self.fc.weight.dtype))

    def forward_dense(self, features: Features) -> list[Tensor]:
        T = features.tokens_BT.shape[1]
        if T < 3:
            return [self.fc.weight.new_zeros(len(features.tokens_BT), 0, self.fc.out_features) for _ in range(self.trained_depth)]
        embedded_BTD = self.backbone.embed(features.tokens_BT)
        state_BTD = self.fuse(features)
        blocks = divide(features.document_BT, (len(state_BTD), self.layer_config.num_attention_heads, T - 2), state_BTD.device)
        passes: list[tuple[Tensor, Tensor]] = []
        states = []
        for k in range(self.trained_depth):
            Tk = max(T - 2 - k, 0)
            inputs = ((embedded_BTD[:, k + 1 : k + 1 + Tk], state_BTD[:, :Tk]), tuple(passes), self.cached.rotary, blocks)
            if self.recomputing and torch.is_grad_enabled():
                state_BTD, keys_values = checkpoint(self.midlayer.forward_train, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                state_BTD, keys_values = self.midlayer.forward_train(*inputs)
            passes.append(keys_values)
            states.append(state_BTD)
        return states

    def recompute(self) -> None:
        self.recomputing = True

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        self.cached.limit(window, sink, offload)

    def begin(self, features: Features, state: State | None = None) -> State:
        """Extend the KV cache with pairs (token, fused state of the position before it).

        The last fused state is kept until its token is known; a sequence's first token forms no pair.
        """
        counts_B = features.lengths_B
        last_B = (counts_B - 1).clamp(min=0)
        if state is None:
            cache, tokens_BT, new_B, shift = self.cached.empty(features.tokens_BT), features.tokens_BT[:, 1:], last_B, 0
        else:
            cache, tokens_BT, new_B, shift = state.cache, features.tokens_BT, counts_B, 1
        offsets_BT = self.cached.kept_offsets(cache, tokens_BT.shape[1], new_B)
        fused_BTD = self.fuse(features, torch.cat([offsets_BT - shift, last_B[:, None]], 1).clamp(min=0))
        before_BTD, last_BD = fused_BTD[:, :-1], fused_BTD[:, -1]
        if state is not None:
            before_BTD = torch.where((offsets_BT == 0)[..., None], state.pending_BD[:, None], before_BTD)
            last_BD = torch.where((counts_B > 0)[:, None], last_BD, state.pending_BD)
        pairs_BTX = self.midlayer.inputs(self.backbone.embed(tokens_BT.gather(1, offsets_BT)), before_BTD)
        return State(self.cached.extend(cache, pairs_BTX, offsets_BT, new_B), last_BD)

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        ancestors_BNM = extend_ancestors(state.ancestors_BNM if depth else None, parents_BN)
        if depth == 0:
            before_BND = state.pending_BD[:, None].expand(-1, tokens_BN.shape[1], -1)
        else:
            assert state.hidden_BND is not None
            before_BND = state.hidden_BND.gather(1, parents_BN[..., None].expand(-1, -1, state.hidden_BND.shape[-1]))
        pairs_BNX = self.midlayer.inputs(self.backbone.embed(tokens_BN), before_BND)
        hidden_BND, cache = self.cached.attend_nodes(state.cache, pairs_BNX, before_BND, ancestors_BNM, depth)
        return hidden_BND, replace(state, cache=cache, hidden_BND=hidden_BND, ancestors_BNM=ancestors_BNM)

    def engine_config(self) -> dict[str, Any]:
        """Return a configuration for all engines that load EAGLE-3, with taps counted in both conventions in use."""
        return engine_fields(self.layer_config, self.fc.weight.dtype) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.draft_vocab,
            "norm_before_residual": False,
            "num_aux_hidden_states": len(self.taps),
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps]},
        }


def _taps(taps: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    chosen = sorted(set(taps)) if taps is not None else [2, num_layers // 2, num_layers - 3]
    if taps is None and (num_layers < 6 or len(set(chosen)) < 3):
        chosen = sorted({1, num_layers // 2, num_layers - 1} - {0}) if num_layers > 1 else [num_layers]
    if not chosen or any(not 0 <= tap <= num_layers for tap in chosen):
        raise UserError(f"drafter.taps are layer counts from 0 (the embedding) to {num_layers}; got {taps!r}")
    return tuple(chosen)
