"""Hydra (2402.05109): sequentially dependent heads; head k drafts ``x_{t+2+k}`` from the hidden state of t and the tokens since.

Head k reads the hidden state of position t concatenated with the embeddings of the root and of the k tokens drafted so far, all from
the backbone's frozen embedding. It is ``layers`` residual blocks, the first of which maps this input of k + 2 widths to one, and an
output layer of its own. With ``prefix_attention``, as in Hydra++, the hidden state is replaced by the output of one decoder layer with
its own KV cache that reads the hidden states of all positions up to t.

All blocks and the decoder layer start as the identity on the hidden state, and the output layers as the backbone's, so an untrained
head gives the backbone's next-token distribution, as an untrained Medusa head does. Entries of an embedding are often a tenth to a
hundredth of a hidden state's, and steps of one learning rate would leave the columns that read them far behind; so heads read
embeddings scaled to unit size. In a checkpoint the scale is part of the weights, and heads read plain embeddings, as in the paper.

Shape suffixes: B batch, T positions, D width, X width of a head's input, N tree nodes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features, of_parents
from headstart.heads.layers.cached_layers import CachedLayer
from headstart.heads.layers.causal_attention import divide
from headstart.heads.layers.decoder_layer import DecoderLayer, Norm, Rotary
from headstart.heads.layers.draft_cache import DraftCache
from headstart.heads.layers.rows import RowState, drafted
from headstart.heads.layers.start_values import layer_weights, llama_like, probe
from headstart.heads.medusa import ResBlock
from headstart.heads.own_readout import OwnReadoutConfig, OwnReadoutDrafter
from headstart.support.config import Depth, Layers
from headstart.support.devices import spread


@dataclass(frozen=True)
class State(RowState):
    """The hidden state that heads read, the prefix layer's KV cache, and the last drafted nodes' inputs to their heads."""

    last_B1D: Tensor
    cache: DraftCache | None = None
    """None: no prefix layer."""
    inputs_BNX: Tensor | None = drafted()


class PrefixLayer(nn.Module):
    """A Llama layer and a norm over the backbone's final hidden states."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        config = llama_like(backbone, None)
        self.heads = config.num_attention_heads
        self.layer = DecoderLayer(config)
        self.norm = Norm(backbone.dim, eps=config.rms_norm_eps)
        self.cached = CachedLayer(self.layer, Rotary(config))

    @torch.no_grad()
    def init_from(self, backbone: Backbone) -> None:
        """Start as the identity, up to the norm, with the inner weights of the backbone's last layer if the shapes agree.

        The two projections that write to the residual stream are zero, and the norm has the size of the backbone's hidden states.
        """
        if (last := layer_weights(backbone)) is not None:
            self.layer.start_as(last[0])
        self.layer.self_attn.o_proj.weight.zero_()
        self.layer.mlp.down_proj.weight.zero_()
        hidden_1TD = probe(backbone).hidden_BTD.float()
        self.norm.weight.fill_(hidden_1TD.square().mean(-1).sqrt().median().item())

    def forward(self, hidden_BTD: Tensor, document_BT: Tensor | None) -> Tensor:
        """Compute the output at all positions, each attending to its document up to itself."""
        B, T, _ = hidden_BTD.shape
        blocks = divide(document_BT, (B, self.heads, T), hidden_BTD.device)
        return self.norm(self.layer.forward_train((hidden_BTD,), (), self.cached.rotary, blocks)[0])

    def extend(self, cache: DraftCache, hidden_BTD: Tensor, last_B1D: Tensor, counts_B: Tensor) -> tuple[DraftCache, Tensor]:
        """Add the positions to the cache and compute the output ``[B, 1, D]`` at each row's last, whose hidden state is ``last_B1D``."""
        offsets_BT = self.cached.kept_offsets(cache, hidden_BTD.shape[1], counts_B)
        kept_BTD = hidden_BTD.gather(1, offsets_BT[..., None].expand(-1, -1, hidden_BTD.shape[-1]))
        cache = self.cached.extend(cache, self.layer.inputs(kept_BTD), offsets_BT, counts_B)
        return cache, self.norm(self.cached.attend_last(cache, self.layer.inputs(last_B1D), last_B1D))


class Hydra(OwnReadoutDrafter):
    """`trained_depth` heads; head k reads a hidden state and k + 1 embeddings."""

    class Config(OwnReadoutConfig):
        depth: Depth = 4
        """Number of heads: tokens drafted beyond the root."""
        layers: Layers = 4
        """Residual blocks of each head: 1 in Hydra, 4 in Hydra++."""
        prefix_attention: bool = True
        """Heads read the output of a decoder layer over the hidden states (Hydra++); false: the last hidden state itself."""

    config: Config
    capturable = recomputable = True
    deepens = False
    file_name = "hydra_lm_head.safetensors"

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__(backbone, config)
        D = backbone.dim
        self.prefix = PrefixLayer(backbone) if config.prefix_attention else None
        self.mlps = nn.ModuleList(
            nn.Sequential(ResBlock(D, (k + 2) * D), *(ResBlock(D) for _ in range(config.layers - 1))) for k in range(config.depth)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(D, self.draft_vocab) for _ in range(config.depth))
        self.embedding_scale = 1.0
        """A power of two, so that weights are scaled without rounding; set with the weights, since it depends on the backbone's."""

    def output_layers(self) -> list[nn.Linear]:
        return [head for head in self.lm_heads if isinstance(head, nn.Linear)]

    def init_from(self, backbone: Backbone) -> None:
        super().init_from(backbone)
        self.embedding_scale = _embedding_scale(backbone)
        for module in self.modules():
            if isinstance(module, ResBlock):
                module.start_as_identity()
        for layer in self.output_layers():
            layer.bias.zero_()
        if self.prefix is not None:
            self.prefix.init_from(backbone)

    @property
    def _dtype(self) -> torch.dtype:
        return self.output_layers()[0].weight.dtype

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.backbone.embed(tokens)
        return embedded.to(self._dtype) * self.embedding_scale

    # Training.

    def forward_dense(self, features: Features) -> list[Tensor]:
        T = features.tokens_BT.shape[1]
        hidden_BTD, embedded_BTD = features.hidden_BTD[:, : max(T - 2, 0)].to(self._dtype), self._embed(features.tokens_BT)
        if self.prefix is not None and T > 2:
            hidden_BTD = self.checkpointed(self.prefix)(hidden_BTD, features.document_BT)
        states = []
        for k, mlp in enumerate(self.mlps):
            Tk = max(T - 2 - k, 0)
            states.append(self.checkpointed(_Joined(mlp))(hidden_BTD[:, :Tk], *(embedded_BTD[:, i : i + Tk] for i in range(1, k + 2))))
        return states

    # Decoding.

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        if self.prefix is None:
            super().limit(window, sink, offload)
        else:
            self.prefix.cached.limit(window, sink, offload)

    def begin(self, features: Features, state: State | None = None) -> State:
        last_B1D, cache = features.last_B1D.to(self._dtype), None
        if self.prefix is not None:
            cache = self.prefix.cached.empty(features.tokens_BT) if state is None else state.cache
            assert cache is not None
            cache, last_B1D = self.prefix.extend(cache, features.hidden_BTD.to(self._dtype), last_B1D, features.lengths_B)
        return State(features.newer(last_B1D, None if state is None else state.last_B1D), cache)

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        before_BNX = of_parents(state.last_B1D, state.inputs_BNX if depth else None, parents_BN)
        inputs_BNX = torch.cat([before_BNX, self._embed(tokens_BN)], -1)
        hidden_BND: Tensor = self.mlps[depth](inputs_BNX)
        return hidden_BND, replace(state, inputs_BNX=inputs_BNX)

    # On disk.

    def engine_config(self) -> dict[str, Any]:
        """Return the configuration of the paper's own code; no serving engine loads Hydra heads."""
        return {
            "hydra_num_heads": self.config.depth,
            "hydra_num_layers": self.config.layers,
            "hydra_head_arch": "mlp" if self.prefix is None else "prefix-mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": self.backbone.name,
            "hidden_size": self.backbone.dim,
            "vocab_size": self.backbone.vocab,
            **({} if self.vocabulary is None else {"draft_vocab_size": self.draft_vocab}),
        }

    def tensors(self) -> dict[str, Tensor]:
        return {self._stored_name(name): self._scaled(name, x, self.embedding_scale) for name, x in self.state_dict().items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        names = {self._stored_name(name): name for name in self.state_dict()}
        self.embedding_scale = _embedding_scale(self.backbone)
        ours = {names.get(name, name): tensor for name, tensor in tensors.items()}
        super().load_tensors({name: self._scaled(name, tensor, 1 / self.embedding_scale) for name, tensor in ours.items()})

    def _scaled(self, name: str, weight: Tensor, scale: float) -> Tensor:
        """Scale the columns of a weight that read embeddings, if it has any."""
        D = self.backbone.dim
        reads_embeddings = re.fullmatch(r"mlps\.\d+\.0\.\w+\.weight", name)
        return torch.cat([weight[:, :D], weight[:, D:] * scale], 1) if reads_embeddings and weight.ndim == 2 else weight

    def _stored_name(self, name: str) -> str:
        """Return a weight's name in the paper's own code, in which dropout layers are counted if there is a prefix layer."""
        part, _, rest = name.partition(".")
        if part == "prefix":
            return "prefix_embeding_layer." + (rest.replace("layer.", "layers.0.", 1) if rest.startswith("layer.") else rest)
        if part == "mlps":
            head, block, weight = rest.split(".", 2)
            return f"hydra_mlp.{head}.{int(block) if self.prefix is None else 2 * int(block) + 1}.{weight}"
        if part == "lm_heads":
            head, weight = rest.split(".")
            return f"hydra_lm_head.{head}.{weight}" if self.prefix is None else f"hydra_lm_head.{head}.1.{weight}"
        return name


def _embedding_scale(backbone: Backbone) -> float:
    """Return the power of two that makes embeddings nearest to unit size."""
    tokens_N = torch.tensor(spread(0, backbone.vocab - 1, min(1024, backbone.vocab)), device=backbone.device)
    size = backbone.embed(tokens_N).float().square().mean().sqrt().clamp(min=2.0**-20)
    return float(2.0 ** -size.log2().round().item())


class _Joined:
    """A module called with the concatenation of its arguments, which gradient checkpointing then does not keep."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *parts: Tensor) -> Tensor:
        joined: Tensor = self.module(torch.cat(parts, -1))
        return joined
