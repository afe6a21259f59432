"""Parallel block heads: one pass of a few decoder layers over the root and mask tokens drafts a whole block.

DFlash (2602.06036): the tapped layers of the backbone are fused into one context; every layer projects it to keys and values of its
own, and the elements of the block attend to the context and to the whole block. The backbone's embedding and output layer are shared.
DSpark (2607.05147) adds a low-rank correction of the logits by the parent token, Domino (2605.29707) one by the state of a small GRU
over the drafted path, DFlash2 one of the likeliest tokens by the parent; with any, a block is computed once and its depths are drafted one
after another, in trees along every path. DFlash2 also has convolutions within a block. JetSpec (2606.18394) is DFlash with causal blocks.

Element i of a block is at position t+1+i, where t is the anchor and element 0 the root. In DSpark and Domino element i drafts depth i, so
that a block has as many elements as depths; in the others element i+1 does. All are as in the published checkpoints.

Shape suffixes: B batch, T positions, M anchors, N elements of a block or tree nodes, K depth, D width, G size of the GRU's state.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Anchors, Features, dense_from_anchors, of_parents
from headstart.heads.base import Drafter, DrafterConfig
from headstart.heads.layers import block_parts as parts
from headstart.heads.layers.block_attention import lay_out, seen_elements
from headstart.heads.layers.cached_layers import CachedLayer
from headstart.heads.layers.decoder_layer import Norm, Rotary, rotary_at
from headstart.heads.layers.draft_cache import DraftCache, NodeSlots
from headstart.heads.layers.rows import RowState, drafted
from headstart.heads.layers.start_values import LayerShape, engine_fields, llama_like, probe, start_fusion, start_normed, tap_sizes
from headstart.support.config import Depth, Layers, Size
from headstart.support.errors import UserError

ANCHORED = ("markov", "recurrent")
"""Corrections of blocks that draft from their first element, the anchor."""


@dataclass(frozen=True)
class State(RowState):
    """Each layer's keys and values of the context; with a correction also the drafted block, and the GRU's state at the last nodes."""

    caches: tuple[DraftCache, ...]
    block_BKD: Tensor | None = drafted()
    paths_BNG: Tensor | None = drafted()


class Block(Drafter):
    """A few layers over a block, once per draft."""

    class Config(DrafterConfig):
        depth: Depth = 7
        """Tokens of a block beyond the root."""
        layers: Layers = 3
        """Decoder layers."""
        taps: tuple[int, ...] | None = None
        """Layers whose residual stream is fused into the context, counted from 1 (null: up to five, evenly spaced)."""
        intermediate_size: Size | None = None
        """Width of the feed-forward part (null: the backbone's)."""
        correction: Literal["none", "markov", "recurrent", "selector"] = "markov"
        """Of the logits: none (DFlash), by the parent token (``markov``, DSpark), by the path (``recurrent``, Domino), or of the likeliest
        tokens by the parent and the hidden state (``selector``, DFlash2)."""
        correction_rank: Size = 256
        """Rank of the correction."""
        confidence: bool = False
        """Estimate whether a draft is accepted if those before it are (``correction: markov``); engines verify fewer drafts by that."""
        selector_candidates: Size = 16
        """Tokens of each depth that ``correction: selector`` scores."""
        convolution: bool = False
        """Mix each element with the one before it, before and after attention and the feed-forward part (DFlash2)."""
        recurrent_size: Size | None = None
        """Size of the state of a recurrent correction (null: a quarter of the backbone's width)."""
        anchor_share: Annotated[float, Gt(0), Le(1)] = 0.5
        """Share of the label positions at which a step trains a block."""
        mask_token: Annotated[int, Ge(0)] | None = None
        """Token whose embedding stands for the tokens to draft (null: the backbone's end-of-text token, or the last)."""
        sliding_window: Annotated[int, Ge(1)] | None = None
        """Positions up to its own that an element attends to, in training and decoding; at least a block (null: all)."""
        causal: bool = False
        """Elements attend to the earlier ones of their block alone, as in heads trained by speculators and, with ``correction: none``, in
        JetSpec; false: to all."""
        layer: LayerShape | None = None
        """Shape of the decoder layers (null: the backbone's); heads trained elsewhere may differ in it."""

    config: Config
    reads_hidden = deepens = False
    capturable = recomputable = True
    added = ("candidate_selector", "attention_conv", "mlp_conv", "confidence_head")
    """Parts that a warm start may lack: they are initialised without effect."""
    fixed_arguments = ("mask_token", "causal", "sliding_window", "layer")

    def __init__(self, backbone: Backbone, config: Config) -> None:
        taps, mask = parts.block_taps(config.taps, backbone.num_layers), parts.mask_token(config.mask_token, backbone)
        super().__init__(backbone, config.model_copy(update={"taps": taps, "mask_token": mask}))
        self.taps, self.mask_token, self.anchor_share = taps, mask, config.anchor_share
        self.sequential = self.own_readout = config.correction != "none"
        self.all_depths_at_once = not self.sequential
        self.skipped = 0 if config.correction in ANCHORED else 1
        """Elements of a block before the one that drafts depth 0."""
        self.elements = config.depth + self.skipped
        if backbone.max_positions is not None and self.elements > backbone.max_positions:
            raise UserError(f"a block of drafter.depth={config.depth} is longer than the backbone's context of {backbone.max_positions}")
        if config.sliding_window is not None and config.sliding_window < self.elements:
            least = f"{self.elements}, the length of a block (drafter.depth)"
            raise UserError(f"drafter.sliding_window is at least {least}; got {config.sliding_window}")
        self.layer_config = llama_like(backbone, config.intermediate_size, config.layer)
        self.layer_config.num_hidden_layers = config.layers
        D, eps = backbone.dim, self.layer_config.rms_norm_eps
        self.fc = nn.Linear(len(taps) * D, D, bias=False)
        self.hidden_norm, self.norm = Norm(D, eps=eps), Norm(D, eps=eps)
        if config.convolution and D % parts.GROUP:
            raise UserError(f"drafter.convolution=true is of widths that {parts.GROUP} divides; the backbone's is {D}: set it to false")
        layers = [(parts.ConvolvedLayer if config.convolution else parts.BlockLayer)(self.layer_config) for _ in range(config.layers)]
        self.layers: Any = nn.ModuleList(layers)
        self.rotary = Rotary(self.layer_config)
        self.cached = [CachedLayer(layer, self.rotary, config.sliding_window) for layer in layers]
        if config.confidence and config.correction != "markov":
            raise UserError(f"drafter.confidence=true is of drafter.correction=markov; got {config.correction}: set either otherwise")
        if config.correction == "markov":
            self.markov_head = parts.MarkovHead(backbone.vocab, config.correction_rank)
            if config.confidence:
                self.confidence_head = parts.ConfidenceHead(D, config.correction_rank)
        elif config.correction == "selector":
            self.candidate_selector = parts.CandidateSelector(backbone.vocab, D, config.correction_rank, config.selector_candidates)
        elif config.correction == "recurrent":
            state, rank = config.recurrent_size or max(1, D // 4), config.correction_rank
            self.prefix_gru = nn.GRU(D, state, bias=False, batch_first=True)
            self.embed_proj = nn.Sequential(nn.Linear(D + state, rank, bias=False), nn.SiLU(), nn.Linear(rank, backbone.vocab, bias=False))

    def context(self, features: Features, index_BT: Tensor | None = None) -> Tensor:
        """Fuse the tapped layers: ``[B, T, D]``, at the positions ``index_BT`` of each row only if given."""
        return self.hidden_norm(self.fc(features.concatenated(self.taps, index_BT).to(self.fc.weight.dtype)))

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.backbone.embed(tokens).to(self.fc.weight.dtype)

    def _embed_blocks(self, roots_M: Tensor) -> Tensor:
        """Embed the blocks ``[M, N, D]`` of these roots: the root, then mask tokens."""
        masks_MN = roots_M.new_full((roots_M.shape[0], self.elements - 1), self.mask_token)
        return self._embed(torch.cat([roots_M[:, None], masks_MN], 1))

    # Training.

    def forward(self, features: Features, at: Anchors | None = None) -> list[Tensor]:
        tokens_BT, K = features.tokens_BT, self.trained_depth
        if at is None:
            return dense_from_anchors(lambda anchors: self.forward(features, anchors), tokens_BT)
        inputs_MK = at.position_M[:, None] + 1 + torch.arange(K, device=tokens_BT.device)  # depth k follows x_{t+1+k}
        tokens_MK = tokens_BT[at.row_M[:, None], inputs_MK.clamp(max=tokens_BT.shape[1] - 1)]
        hidden = list(self._blocks(features, at, tokens_MK[:, 0]).unbind(1))
        if self.config.correction != "recurrent":
            return hidden
        path_MG, corrected = hidden[0].new_zeros(len(tokens_MK), self.prefix_gru.hidden_size), []
        for k, hidden_MD in enumerate(hidden):
            path_MG = self._advance(tokens_MK[:, k], path_MG)
            corrected.append(self._correct(hidden_MD, path_MG, k))
        return corrected

    def _blocks(self, features: Features, at: Anchors, roots_M: Tensor) -> Tensor:
        """Return the normed hidden states ``[M, K, D]`` of the blocks at the anchors."""
        (T, N), device = (features.tokens_BT.shape[1], self.elements), roots_M.device
        layout = lay_out(at, features.tokens_BT, features.document_BT, N, self.config.causal, self.config.sliding_window)
        context_BTD, block_MND = self.context(features), self._embed_blocks(roots_M)
        positions_MN = at.position_M[:, None] + 1 + torch.arange(N, device=device)
        rotations = self.rotary(0, T, device), rotary_at(self.rotary.table(T + N, device), positions_MN)
        for layer in self.layers:
            inputs = block_MND, context_BTD, rotations, layout
            block_MND = self.checkpointed(layer.forward_blocks)(*inputs)
        return self.norm(block_MND)[:, self.skipped :]

    # The corrections.

    def _advance(self, tokens: Tensor, path: Tensor) -> Tensor:
        """Return the GRU's states ``[..., G]`` after the tokens, from those before them."""
        weights = [self.prefix_gru.get_parameter(name) for name in ("weight_ih_l0", "weight_hh_l0")]
        return torch.gru_cell(self._embed(tokens).flatten(0, -2), path.flatten(0, -2), *weights).unflatten(0, tokens.shape)

    def _correct(self, hidden: Tensor, path: Tensor, depth: int) -> Tensor:
        """Append the inputs of the correction's output layer to the block's hidden states; depth 0, which knows its path, has none."""
        mixed = self.embed_proj[1](self.embed_proj[0](torch.cat([hidden, path], -1)))
        return torch.cat([hidden, mixed if depth else torch.zeros_like(mixed)], -1)

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        kind, D = self.config.correction, self.backbone.dim
        logits = self.backbone.readout(hidden[..., :D].to(self.backbone.dtype))
        if kind == "none":
            return logits
        if kind == "recurrent":
            return logits + self.embed_proj[2](hidden[..., D:])
        assert parent_tokens is not None
        return logits + self.markov_head(parent_tokens) if kind == "markov" else self.candidate_selector(logits, hidden, parent_tokens)

    def confidence(self, hidden: Tensor, parent_tokens: Tensor) -> Tensor | None:
        return self.confidence_head(hidden, self.markov_head.markov_w1(parent_tokens)) if self.config.confidence else None

    # Decoding.

    def limit(self, window: int | None, sink: int = 4, offload: bool = False) -> None:
        for cached in self.cached:
            cached.limit(window, sink, offload)

    def reserve(self, state: State, length: int) -> State:
        return state.reserve(length + self.elements)  # a block is whole, however few of its tokens a tree takes

    def begin(self, features: Features, state: State | None = None) -> State:
        """Extend every layer's cache by keys and values of the context."""
        tokens_BT, counts_B = features.tokens_BT, features.lengths_B
        caches = tuple(cached.empty(tokens_BT) for cached in self.cached) if state is None else state.caches
        offsets_BT = self.cached[0].kept_offsets(caches[0], tokens_BT.shape[1], counts_B)
        context_BTD = self.context(features, offsets_BT)
        pairs = zip(self.cached, caches, strict=True)
        return State(tuple(cached.extend(cache, context_BTD, offsets_BT, counts_B) for cached, cache in pairs))

    def step(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        """Compute the block at depth 0; deeper steps only select from it and follow the paths."""
        if depth == 0:
            state = self._draft(state, tokens_BN[:, 0])
        assert state.block_BKD is not None
        if self.all_depths_at_once:
            return state.block_BKD, state
        hidden_B1D = state.block_BKD[:, depth : depth + 1]
        if self.config.correction != "recurrent":
            return hidden_B1D, state
        start_B1G = hidden_B1D.new_zeros(tokens_BN.shape[0], 1, self.prefix_gru.hidden_size)
        before_BNG = of_parents(start_B1G, state.paths_BNG if depth else None, parents_BN)
        paths_BNG = self._advance(tokens_BN, before_BNG)
        hidden_BND = hidden_B1D.expand(-1, tokens_BN.shape[1], -1)
        return self._correct(hidden_BND, paths_BNG, depth), replace(state, paths_BNG=paths_BNG)

    def _draft(self, state: State, roots_B: Tensor) -> State:
        block_BND, caches = self._embed_blocks(roots_B), []
        N, device = self.elements, roots_B.device
        offsets_N, seen_BNN = torch.arange(N, device=device), seen_elements(N, self.config.causal, device).expand(roots_B.shape[0], -1, -1)
        for cached, cache in zip(self.cached, state.caches, strict=True):
            nodes = NodeSlots.block(cache, seen_BNN, offsets_N, cached.window)
            block_BND, cache = cached.attend_nodes(cache, cached.layer.inputs(block_BND), block_BND, nodes, offsets_N)
            caches.append(cache)
        return State(tuple(caches), self.norm(block_BND)[:, self.skipped :])

    # On disk and at the start.

    def init_from(self, backbone: Backbone) -> None:
        """Initialise the context as the deepest tap plus small random parts of all, the layers as the backbone's last where the shapes
        agree, and the corrections and convolutions without effect.
        """
        super().init_from(backbone)
        for module in self.modules():
            if isinstance(module, parts.MarkovHead | parts.ConfidenceHead | parts.CandidateSelector | parts.BlockConvolution):
                module.start()
        start_fusion(self.fc.weight, probe(backbone, self.taps).concatenated(self.taps))
        for i, layer in enumerate(self.layers):
            final = start_normed(layer, backbone, max(backbone.num_layers - len(self.layers) + i, 0))
            if final is not None:
                self.norm.weight.copy_(final)
        if self.config.correction == "recurrent":
            self.embed_proj[2].get_parameter("weight").zero_()

    def input_sizes(self) -> dict[str, list[float]]:
        return {"fc.weight": tap_sizes(self.backbone, self.taps)}

    def engine_config(self) -> dict[str, Any]:
        """Return the configuration of a DFlash, DFlash2, DSpark or Domino model, with taps counted in both conventions in use."""
        window, kind = self.config.sliding_window, self.config.correction
        sliding = {"sliding_window": window, "use_sliding_window": True, "is_causal": self.config.causal}  # not by default
        layout = self._layout()
        common = engine_fields(self.layer_config, self.fc.weight.dtype) | {
            "model_type": "qwen3",
            "layer_types": ["full_attention" if window is None else "sliding_attention"] * self.config.layers,
            **({} if window is None else sliding),
            "num_target_layers": self.backbone.num_layers,
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "block_size": self.elements,
            "draft_vocab_size": self.backbone.vocab,
            "sample_from_anchor": not self.skipped,  # readers disagree on what a missing key means
        }
        if kind == "markov":
            rank = {"markov_rank": self.config.correction_rank, "markov_head_type": "vanilla", "dspark_bonus_anchor": False}
            confidence = dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), self.config.confidence)
            return common | layout | rank | confidence | {"architectures": ["Qwen3DSparkModel"], "dflash_config": layout}
        second = kind == "selector" or kind == "none" and self.config.convolution
        return common | {"architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"], "dflash_config": layout}

    def _layout(self) -> dict[str, Any]:
        """Return ``dflash_config``. Whether blocks are causal is said wherever readers disagree on what a missing key means."""
        config, cap = self.config, getattr(self.backbone.config, "final_logit_softcapping", None)
        layout: dict[str, Any] = {"target_layer_ids": [tap - 1 for tap in self.taps], "mask_token_id": self.mask_token}
        if config.causal or config.sliding_window is not None or config.convolution or config.correction == "selector":
            layout |= {"causal": config.causal}
        if config.convolution:
            layout |= {"conv_kernel_size": parts.TAPS, "conv_group_size": parts.GROUP}
        if config.correction == "selector":
            layout |= {"selector_rank": config.correction_rank, "selector_top_k": self.candidate_selector.candidates}
            layout |= {"block_size": self.elements} | ({} if cap is None else {"final_logit_softcapping": cap})
        elif config.correction == "recurrent":
            sizes = {"emb_dim": config.correction_rank, "gru_hidden_dim": self.prefix_gru.hidden_size}
            layout |= {"projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1, **sizes}
        return layout
