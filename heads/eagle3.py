"""EAGLE-3 (2503.01840): one decoder layer that reads three fused backbone layers, trained on its own outputs.

Row t of the first pass is the pair (embedding of ``x_{t+1}``, fused taps of t); what comes out drafts ``x_{t+2}`` and, before
its norm, is fed back in place of the fused taps for the next depth. The training-time test runs those ``depth`` passes at
all positions at once: pass k attends to the keys of the first pass up to t and to its own earlier passes at t. Names, norm
order and the state fed back are those that serving engines load (``norm_before_residual`` false).

Shape suffixes: B batch, T positions, S keys, D width, H heads, N tree nodes, M drafted nodes so far, K depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.last_layer import last_layer
from headstart.heads.base import Drafter, Features, require_count
from headstart.heads.layers.causal_attention import divide
from headstart.heads.layers.decoder_layer import Norm, PairLayer, Rotary, llama_like
from headstart.heads.layers.draft_cache import DraftCache, Ring
from headstart.heads.layers.ragged import put, visible
from headstart.support.errors import UserError


@dataclass(frozen=True)
class State:
    """What an EAGLE-3 head knows of each row: its pairs, the state that waits for its next token, the drafted nodes."""

    store: DraftCache
    pending_BD: Tensor
    hidden_BND: Tensor | None = None
    ancestors_BNM: Tensor | None = None
    """Of the last depth's nodes among all nodes drafted so far."""


class Eagle3(Drafter):
    """``depth`` passes of one layer.

    ``taps``: three layers, by default ``(2, L//2, L-3)``. ``draft_vocab_size``: how many of the most frequent tokens are drafted
    (None: all). ``intermediate_size``: width of the feed-forward part (None: the backbone's).
    """

    captures = True
    recomputing = False
    ring: Ring | None = None
    offload = False
    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        backbone: Backbone,
        *,
        depth: int = 5,
        taps: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        intermediate_size: int | None = None,
    ) -> None:
        super().__init__(backbone)
        require_count("depth", depth)
        self.depth, self.draft_vocab_size = depth, draft_vocab_size
        self.taps = _taps(taps, backbone.num_layers)
        self.arguments = {
            "depth": depth,
            "taps": list(self.taps),
            "draft_vocab_size": draft_vocab_size,
            "intermediate_size": intermediate_size,
        }
        for name in ("draft_vocab_size", "intermediate_size"):
            if self.arguments[name] is not None:
                require_count(name, self.arguments[name])
        if draft_vocab_size is not None and draft_vocab_size > backbone.vocab:
            raise UserError(f"drafter.draft_vocab_size is at most the backbone's vocabulary of {backbone.vocab}; got {draft_vocab_size}")
        self.layer_config: LlamaConfig = llama_like(backbone, intermediate_size)
        D = backbone.dim
        self.fc = nn.Linear(len(self.taps) * D, D, bias=False)
        self.midlayer = PairLayer(self.layer_config)
        self.norm = Norm(D, eps=self.layer_config.rms_norm_eps)
        self.lm_head = nn.Linear(D, draft_vocab_size or backbone.vocab, bias=False)
        self.rotary = Rotary(self.layer_config)
        self._start()
        if draft_vocab_size is None:
            self.lm_head.weight.data.copy_(backbone.unembed.weight)
        else:
            self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(backbone.vocab, dtype=torch.bool))
            self.use_vocabulary(torch.arange(draft_vocab_size))

    def use_vocabulary(self, tokens: Tensor) -> None:
        """Draft these backbone tokens (int64 ``[DV]``) and no others; the readout starts as the backbone's rows of them."""
        tokens = tokens.sort().values.to(self.d2t.device)
        assert len(tokens) == self.draft_vocab_size and len(tokens.unique()) == len(tokens)
        self.d2t.copy_(tokens - torch.arange(len(tokens), device=tokens.device))
        self.t2d.zero_()
        self.t2d[tokens] = True
        self.lm_head.weight.data.copy_(self.backbone[0].unembed.weight[tokens.to(self.backbone[0].device)])
        self.vocabulary = tokens

    @torch.no_grad()
    def _start(self) -> None:
        """The fused state starts as the deepest tap with a little of the others, each brought to unit size; the layer as the backbone's
        last, where that is shaped alike.

        Residual streams are tens of units large, beside which the layer's own first contributions would not count.
        """
        backbone, D = self.backbone[0], self.fc.out_features
        tokens_1T = torch.linspace(0, backbone.vocab - 1, min(64, backbone.max_positions or 64), device=backbone.device).long()[None]
        taps = backbone.read(tokens_1T, taps=self.taps).taps or {}
        self.fc.weight[:, -D:] += torch.eye(D)
        for i, tap in enumerate(self.taps):
            size = taps[tap].float().square().mean(-1).sqrt().median()  # of positions: the first is often an outlier
            self.fc.weight[:, i * D : (i + 1) * D] /= size.clamp(min=1e-6).item()
        if (last := last_layer(backbone)) is not None and self.midlayer.start_as(last[0]):
            self.norm.weight.copy_(last[1])

    def fuse(self, features: Features) -> Tensor:
        """The tapped layers side by side, brought to one width: ``[B, T, D]``."""
        assert features.taps is not None
        return self.fc(torch.cat([features.taps[tap] for tap in self.taps], -1).to(self.fc.weight.dtype))

    def forward(self, features: Features) -> list[Tensor]:
        T = features.tokens_BT.shape[1]
        if T < 3:
            return [self.fc.weight.new_zeros(len(features.tokens_BT), 0, self.fc.out_features) for _ in range(self.depth)]
        embedded_BTD = self.backbone[0].embed(features.tokens_BT)
        state_BTD = self.fuse(features)
        blocks = divide(features.document_BT, (len(state_BTD), self.layer_config.num_attention_heads, T - 2), state_BTD.device)
        passes: list[tuple[Tensor, Tensor]] = []
        out = []
        for k in range(self.depth):
            Tk = max(T - 2 - k, 0)
            next_BTD = embedded_BTD[:, k + 1 : k + 1 + Tk]
            given = (next_BTD, state_BTD[:, :Tk], tuple(passes), self.rotary, blocks)
            if self.recomputing and torch.is_grad_enabled():
                state_BTD, keys_values = checkpoint(self.midlayer.taught, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                state_BTD, keys_values = self.midlayer.taught(*given)
            passes.append(keys_values)
            out.append(state_BTD)
        return out

    def recompute(self) -> None:
        self.recomputing = True

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return self.lm_head(self.norm(hidden))

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        self.ring, self.offload = None if window is None else Ring(window, sink), offload

    def reserve(self, state: State, length: int) -> State:
        return replace(state, store=state.store.reserve(length, self.rotary))

    def select(self, state: State, rows_B: Tensor) -> State:
        return State(state.store.select(rows_B), state.pending_BD[rows_B])

    def join(self, state: State, other: State) -> State:
        return State(state.store.join(other.store), torch.cat([state.pending_BD, other.pending_BD]))

    def begin(self, features: Features, state: State | None = None) -> State:
        counts_B = features.lengths_B
        last_B = (counts_B - 1).clamp(min=0)
        if state is None:   # a text's first token follows no position: it makes no pair
            store, tokens_BT, new_B = self._empty(features), features.tokens_BT[:, 1:], last_B
        else:
            store, tokens_BT, new_B = state.store, features.tokens_BT, counts_B
        T = tokens_BT.shape[1]
        if store.ring is None or store.ring.slots >= T:
            places_BT = torch.arange(T, device=last_B.device).expand(len(last_B), -1)
            fused_BTD = self.fuse(features)
            last_BD = fused_BTD[torch.arange(len(last_B), device=last_B.device), last_B]
            before_BTD = fused_BTD[:, :-1] if state is None else torch.cat([state.pending_BD[:, None], fused_BTD[:, :-1]], 1)
        else:   # the keys of a pair depend on nothing but that pair
            places_BT = store.ring.wanted(new_B)
            tokens_BT = tokens_BT.gather(1, places_BT)
            index_BT = torch.cat([places_BT - int(state is not None), last_B[:, None]], 1).clamp(min=0)
            fused_BTD = self.fuse(features.gather(index_BT, index_BT >= 0))
            before_BTD, last_BD = fused_BTD[:, :-1], fused_BTD[:, -1]
            if state is not None:
                before_BTD = torch.where((places_BT == 0)[..., None], state.pending_BD[:, None], before_BTD)
        if state is not None:
            last_BD = torch.where((counts_B > 0)[:, None], last_BD, state.pending_BD)
        if T:
            pair = self.midlayer.pair(self.backbone[0].embed(tokens_BT), before_BTD)
            store = store.extend(*self.midlayer.keys_values(pair, store.positions(places_BT)), places_BT, new_B)
        return State(store, last_BD)

    def _empty(self, features: Features) -> DraftCache:
        attn, like_B = self.midlayer.self_attn, features.hidden_BTD[:, 0, 0].to(self.fc.weight.dtype)
        return DraftCache.empty(like_B, (attn.num_kv, features.tokens_BT.shape[1], attn.head_dim), self.rotary, self.ring, self.offload)

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        B, N = tokens_BN.shape
        store = state.store.at_hand()
        itself = torch.eye(N, dtype=torch.bool, device=tokens_BN.device).expand(B, N, N)
        if depth == 0:
            before_BND, ancestors_BNM = state.pending_BD[:, None].expand(-1, N, -1), itself
        else:
            assert state.hidden_BND is not None and state.ancestors_BNM is not None
            before_BND = state.hidden_BND.gather(1, parents_BN[..., None].expand(-1, -1, state.hidden_BND.shape[-1]))
            earlier_BNM = state.ancestors_BNM.gather(1, parents_BN[..., None].expand(-1, -1, state.ancestors_BNM.shape[-1]))
            ancestors_BNM = torch.cat([earlier_BNM, itself], -1)
        drafted = ancestors_BNM.shape[-1] - N
        index_BN = store.ends_B[:, None] + torch.arange(N, device=tokens_BN.device) + drafted
        rotation = store.positions(depth)
        pair = self.midlayer.pair(self.backbone[0].embed(tokens_BN), before_BND)
        for past, new in zip(store.past, self.midlayer.keys_values(pair, rotation), strict=True):
            put(past, new, index_BN)
        see_BNS = visible(store.ends_B, ancestors_BNM, store.slots)
        hidden_BND = self.midlayer.attend(pair, before_BND, rotation, store.past, see_BNS)
        return hidden_BND, replace(state, store=store, hidden_BND=hidden_BND, ancestors_BNM=ancestors_BNM)

    def config(self) -> dict[str, Any]:
        """One directory for every engine that loads EAGLE-3; both countings of the tapped layers."""
        config = self.layer_config.to_dict()
        keep = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_parameters",
            "bos_token_id", "eos_token_id", "pad_token_id",
        )  # fmt: skip
        rope = config["rope_parameters"]
        scaled = {k: v for k, v in rope.items() if k != "rope_theta"} if rope["rope_type"] != "default" else None
        dtype = str(self.fc.weight.dtype).removeprefix("torch.")
        return {name: config[name] for name in keep} | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaled,
            "dtype": dtype,
            "torch_dtype": dtype,
            "draft_vocab_size": self.draft_vocab_size or self.backbone[0].vocab,
            "norm_before_residual": False,
            "num_aux_hidden_states": len(self.taps),
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps]},
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors(tensors)
        if self.draft_vocab_size is not None:
            self.vocabulary = self.t2d.nonzero().flatten()
            offsets = self.vocabulary - torch.arange(len(self.vocabulary), device=self.vocabulary.device)
            if not torch.equal(offsets, self.d2t):
                raise UserError("d2t and t2d disagree about the draft vocabulary: the checkpoint is damaged; train or fetch it again")


def _taps(taps: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    if taps is not None and (not isinstance(taps, list | tuple) or any(not isinstance(tap, int) or isinstance(tap, bool) for tap in taps)):
        raise UserError(f"drafter.taps is a list of layer counts from 0 (the embedding) to {num_layers}; got {taps!r}")
    chosen = sorted(set(taps)) if taps is not None else [2, num_layers // 2, num_layers - 3]
    if taps is None and (num_layers < 6 or len(set(chosen)) < 3):
        chosen = sorted({1, num_layers // 2, num_layers - 1} - {0}) if num_layers > 1 else [num_layers]
    if not chosen or any(not 0 <= tap <= num_layers for tap in chosen):
        raise UserError(f"drafter.taps are layer counts from 0 (the embedding) to {num_layers}; got {taps!r}")
    return tuple(chosen)
