"""Multi-token prediction modules (DeepSeek-V3, 2412.19437; the objective: 2404.19737).

At depth k, module k takes at position t the hidden state of depth k - 1 (at first the backbone's final one, after its norm) and the
embedding of ``x_{t+1+k}``. Its output, after a norm of its own, drafts ``x_{t+2+k}`` through the backbone's output layer and goes to
depth k + 1.

With ``shared`` one module serves all depths and is trained on its own outputs, as in EAGLE-3: pass k attends to the keys of pass 0 up
to t and to those of later passes at t. Otherwise each depth has a module with causal attention over its own inputs, and decoding is
exact: ordered by the token that it takes, module k continues its keys as soon as a token is known. It takes the token ``x_p`` with the
output of module k - 1 at ``x_{p-1}``, and begins at p = k + 1. So a drafted node of depth i passes through the modules i and deeper.

The decoder layer of Qwen3-Next and Qwen3.5 norms queries and keys, rotates them in part, and gates the output by the input; its norm
weights are stored less one.

Shape suffixes: B batch, T positions, D width, K modules, N tree nodes, H heads, C head width.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features, of_parents, pick
from headstart.heads.backbone.weight_files import LAYOUTS, find_native, read_native
from headstart.heads.base import Drafter, DrafterConfig
from headstart.heads.layers.cached_layers import CachedLayer
from headstart.heads.layers.causal_attention import divide, document_positions
from headstart.heads.layers.decoder_layer import OTHER_STREAM_SCALE, DecoderLayer, Norm, NormedAttention, Rotary
from headstart.heads.layers.draft_cache import DraftCache, NodeSlots
from headstart.heads.layers.rows import RowState, drafted
from headstart.heads.layers.start_values import engine_fields, layer_weights, llama_like
from headstart.support.config import Depth
from headstart.support.errors import UserError


class ZeroCenteredNorm(Norm):
    """RMSNorm that scales by ``1 + weight``."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.to(self.weight.dtype), self.normalized_shape, 1 + self.weight, self.eps)


class GatedAttention(NormedAttention):
    """Attention whose query projection also gives a gate for each entry of the output."""

    norm = ZeroCenteredNorm

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__(config, width)
        self.q_proj = nn.Linear(width, 2 * self.num_heads * config.head_dim, bias=False)

    def split_queries(self, x: Tensor) -> Tensor:
        return self._queries_and_gate(x)[0]

    def output(self, mixed_BHTC: Tensor, x: Tensor) -> Tensor:
        return super().output(mixed_BHTC * self._queries_and_gate(x)[1].sigmoid(), x)

    def _queries_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The query and the gate of each head, ``[B, H, T, C]``; a head's rows of the projection hold its query, then its gate."""
        query, gate = self.q_proj(x).unflatten(-1, (self.num_heads, 2 * self.head_dim)).transpose(1, 2).chunk(2, -1)
        return query, gate


class GatedLayer(DecoderLayer):
    """A layer with gated attention and zero-centred norms."""

    attention = GatedAttention

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = ZeroCenteredNorm(D, eps=eps), ZeroCenteredNorm(D, eps=eps)

    def start_as(self, layer: Mapping[str, Tensor]) -> bool:
        return super().start_as({name: weight - 1 if weight.dim() == 1 else weight for name, weight in layer.items()})


def partial_rotary(config: LlamaConfig) -> Rotary:
    """Return the rotary embedding of the first ``partial_rotary_factor`` of each head."""
    share = config.rope_parameters.get("partial_rotary_factor") or 1.0
    part = LlamaConfig.from_dict(config.to_dict())
    part.head_dim = int(config.head_dim * share)
    return Rotary(part)


class MtpModule(nn.Module):
    """``norm(layer(eh_proj([enorm(embedding); hnorm(hidden)])))``: the hidden state that drafts a token and goes to the next depth."""

    def __init__(self, config: LlamaConfig, gated: bool = False, hidden_first: bool = False) -> None:
        """``gated``: the layer is a `GatedLayer`. ``hidden_first``: the hidden state comes first in the concatenation."""
        super().__init__()
        D, norm = config.hidden_size, ZeroCenteredNorm if gated else Norm
        self.hidden_first, self.gated = hidden_first, gated
        self.enorm, self.hnorm, self.norm = (norm(D, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * D, D, bias=False)
        self.layer = GatedLayer(config) if gated else DecoderLayer(config)
        self.cached = CachedLayer(self.layer, partial_rotary(config) if gated else Rotary(config))

    def mix(self, embedded_BTD: Tensor, hidden_BTD: Tensor, zero_BT: Tensor | None = None) -> Tensor:
        """Return the layer's input ``[B, T, D]``; embeddings where ``zero_BT`` is True count as zero."""
        if zero_BT is not None:
            embedded_BTD = embedded_BTD.masked_fill(zero_BT[..., None], 0)
        streams = self.enorm(embedded_BTD), self.hnorm(hidden_BTD)
        return self.eh_proj(torch.cat(streams[::-1] if self.hidden_first else streams, -1))

    @torch.no_grad()
    def start(self, last: tuple[Mapping[str, Tensor], Tensor] | None) -> None:
        """Initialise the projection as the identity of the hidden state plus small random parts of the embedding, and biases as zero.

        ``last`` (see `layer_weights`) are the backbone's last layer and norm, which the layer and the last norm start as if it is shaped
        alike.
        """
        D = self.eh_proj.out_features
        hidden, embedded = (slice(0, D), slice(D, None)) if self.hidden_first else (slice(D, None), slice(0, D))
        self.eh_proj.weight[:, hidden] = torch.eye(D)
        self.eh_proj.weight[:, embedded] *= OTHER_STREAM_SCALE
        for name, weight in self.named_parameters():
            if name.endswith(".bias"):
                weight.zero_()
        if last is not None and self.layer.start_as(last[0]):
            self.norm.weight.copy_(last[1] - 1 if self.gated else last[1])


@dataclass(frozen=True)
class State(RowState):
    """KV cache of each module, what each awaits its next token with, the number of tokens read, and the last drafted nodes."""

    caches: tuple[DraftCache, ...]
    pending_BKD: Tensor
    """The hidden state that module k takes together with the next token."""
    lengths_B: Tensor
    hidden_BND: tuple[Tensor, ...] | None = drafted()
    """Outputs at the last drafted nodes, of the modules that they passed through."""
    nodes: tuple[NodeSlots, ...] | None = drafted()
    """These nodes, in the caches of these modules."""


class Mtp(Drafter):
    """One module for all depths, or one for each."""

    class Config(DrafterConfig):
        depth: Depth = 3
        """Tokens beyond the root that it is trained to draft; with ``shared: false`` the number of modules."""
        shared: bool = True
        """One module for all depths, applied to its own output; false: one module for each depth."""
        native: bool = False
        """Start from the MTP weights in the backbone's checkpoint; an error if it has none."""
        layout: Literal["deepseek", "mimo", "qwen3_5"] | None = None
        """Names, kind of layer and order of inputs (null: those of the checkpoint's MTP weights if native, otherwise deepseek)."""

    config: Config
    own_readout = False
    capturable = recomputable = True

    def __init__(self, backbone: Backbone, config: Config) -> None:
        name = config.layout or (find_native(backbone) if config.native else "deepseek")
        super().__init__(backbone, config.model_copy(update={"layout": name}))
        self.layout, count = LAYOUTS[name], 1 if config.shared else config.depth
        if count > 1 and self.layout.single:
            raise UserError(f"drafter.layout {name} holds one module; set drafter.shared=true, or drafter.depth=1")
        self.layer_config = llama_like(backbone, None)
        self.layer_config.attention_bias = self.layout.attention_bias
        modules = [MtpModule(self.layer_config, self.layout.gated, self.layout.hidden_first) for _ in range(count)]
        self.mtp = nn.ModuleList(modules)
        self.mtps = modules

    @property
    def max_depth(self) -> int | None:
        return None if self.config.shared else self.trained_depth

    def init_from(self, backbone: Backbone) -> None:
        """Initialise the modules from the backbone's checkpoint if ``native``; otherwise each layer as the backbone's last one where
        that is shaped alike, the last norm as the backbone's, and the projection as the identity of the hidden state plus small random
        parts of the embedding.
        """
        super().init_from(backbone)
        if self.config.native:
            self.load_state_dict(read_native(backbone, self.layout.name, {name: w.shape for name, w in self.state_dict().items()}))
            return
        last = layer_weights(backbone)
        for module in self.mtps:
            module.start(last)

    # Training.

    def forward_dense(self, features: Features) -> list[Tensor]:
        (B, T), hidden_BTD = features.tokens_BT.shape, features.hidden_BTD.to(self.mtps[0].layer.dtype)
        if T < 3:
            return [hidden_BTD[:, :0] for _ in range(self.trained_depth)]
        embedded_BTD = self.backbone.embed(features.tokens_BT)
        blocks = divide(features.document_BT, (B, self.layer_config.num_attention_heads, T - 2), hidden_BTD.device)
        documents_BT = torch.zeros_like(features.tokens_BT) if features.document_BT is None else features.document_BT
        first_BT = document_positions(documents_BT) == 0 if self.layout.zero_first else None
        passes: list[tuple[Tensor, Tensor]] = []
        states = []
        for k in range(self.trained_depth):
            module, Tk = self.mtps[0 if self.config.shared else k], max(T - 2 - k, 0)
            zero_BT = first_BT[:, :Tk] if first_BT is not None and k == 0 else None
            mixed_BTD = module.mix(embedded_BTD[:, k + 1 : k + 1 + Tk], hidden_BTD[:, :Tk], zero_BT)
            inputs = ((mixed_BTD,), tuple(passes), module.cached.rotary, blocks)
            output_BTD, keys_values = self.checkpointed(module.layer.forward_train)(*inputs)
            passes += [keys_values] if self.config.shared else []
            hidden_BTD = module.norm(output_BTD)
            states.append(hidden_BTD)
        return states

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        return self.backbone.readout(hidden.to(self.backbone.dtype))

    # Decoding.

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        for module in self.mtps:
            module.cached.limit(window, sink, offload)

    def begin(self, features: Features, state: State | None = None) -> State:
        """Extend each module's keys by the new tokens, each with the module's input at the token before it."""
        counts_B, T = features.lengths_B, features.tokens_BT.shape[1]
        place_BT = torch.arange(T, device=counts_B.device).expand(counts_B.shape[0], -1)
        last_B = (counts_B - 1).clamp(min=0)
        hidden_BTD = features.hidden_BTD.to(self.mtps[0].layer.dtype)
        state = self._empty(features, hidden_BTD) if state is None else state
        caches, pending = [], []
        for k, (module, cache) in enumerate(zip(self.mtps, state.caches, strict=True)):
            before_BD = state.pending_BKD[:, k]
            skipped_B = (k + 1 - state.lengths_B).clamp(min=0).minimum(counts_B)
            new_B = counts_B - skipped_B
            # With several modules a deeper one needs the outputs at all new positions, also at those that a window drops.
            offsets_BT = module.cached.kept_offsets(cache, T, new_B) if len(self.mtps) == 1 else place_BT
            index_BT = (offsets_BT + skipped_B[:, None]).clamp(max=T - 1)
            inputs_BTD = pick(torch.cat([before_BD[:, None], hidden_BTD[:, :-1]], 1), index_BT)
            zero_BT = state.lengths_B[:, None] + index_BT == 1 if self.layout.zero_first and k == 0 else None
            mixed_BTD = module.mix(self.backbone.embed(features.tokens_BT.gather(1, index_BT)), inputs_BTD, zero_BT)
            x_BTX = module.layer.inputs(mixed_BTD)
            caches.append(module.cached.extend(cache, x_BTX, offsets_BT, new_B))
            pending.append(torch.where((counts_B > 0)[:, None], pick(hidden_BTD, last_B[:, None])[:, 0], before_BD))
            if k + 1 < len(self.mtps):
                output_BTD = module.norm(module.cached.attend_new(caches[-1], x_BTX, mixed_BTD, offsets_BT, new_B))
                hidden_BTD = pick(output_BTD, (place_BT - skipped_B[:, None]).clamp(min=0))
        return State(tuple(caches), torch.stack(pending, 1), state.lengths_B + counts_B)

    def _empty(self, features: Features, hidden_BTD: Tensor) -> State:
        """The state of rows without tokens, with capacity for these."""
        B, D = len(features.tokens_BT), hidden_BTD.shape[-1]
        caches = tuple(module.cached.empty(features.tokens_BT) for module in self.mtps)
        return State(caches, hidden_BTD.new_zeros(B, len(self.mtps), D), torch.zeros_like(features.lengths_B))

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        embedded_BND = self.backbone.embed(tokens_BN)
        zero_BN = (state.lengths_B == 1)[:, None].expand(tokens_BN.shape) if self.layout.zero_first and depth == 0 else None
        caches, outputs, slots = list(state.caches), [], []
        for j, k in enumerate(range(1) if self.config.shared else range(depth, len(self.mtps))):
            module = self.mtps[k]
            nodes_BND = state.hidden_BND[j] if depth and state.hidden_BND is not None else None
            before_BND = of_parents(state.pending_BKD[:, k, None], nodes_BND, parents_BN)
            mixed_BND = module.mix(embedded_BND, before_BND, zero_BN if k == 0 else None)
            above = state.nodes[k - len(self.mtps)] if depth and state.nodes is not None else None
            nodes = module.cached.nodes_below(state.caches[k], above, parents_BN, depth)
            output_BND, caches[k] = module.cached.attend_nodes(state.caches[k], module.layer.inputs(mixed_BND), mixed_BND, nodes, depth)
            slots.append(nodes if k == 0 else nodes.hidden(state.lengths_B + depth <= k))  # where the module has not begun
            outputs.append(module.norm(output_BND))
        return outputs[0], replace(state, caches=tuple(caches), hidden_BND=tuple(outputs), nodes=tuple(slots))

    # On disk.

    def engine_config(self) -> dict[str, Any]:
        """Return the configuration of a checkpoint that holds the modules alone; engines load them from the backbone's checkpoint."""
        return engine_fields(self.layer_config, self.mtps[0].layer.dtype) | {
            "architectures": [self.layout.architecture],
            "num_hidden_layers": self.backbone.num_layers,
            self.layout.count_key: len(self.mtps),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights under the names that they have in a backbone's checkpoint."""
        return {self.layout.native(name, self.backbone.num_layers): weight for name, weight in self.state_dict().items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        ours = {self.layout.native(name, self.backbone.num_layers): name for name in self.state_dict()}
        super().load_tensors({ours.get(name, name): weight for name, weight in tensors.items()})
