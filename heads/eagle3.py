"""EAGLE-3 (2503.01840): a decoder layer over fused hidden states of some backbone layers, trained on its own outputs.

The pairs of eagle.py, with the tapped layers concatenated and projected as the state. The layer's output after the final norm is
the state of the next depth, as in EAGLE-3.1 (2605.09992). The original feeds back the output before that norm (``norm_output`` false): its
residual stream grows from depth to depth, until what the layer adds no longer changes its direction, and late depths repeat the first.

Options: two layers; a sliding window; EAGLE-3.1's norms of the taps before they are fused (``fc_norm`` each, ``norm_before_fc`` all
together). Names, norm order and the state fed back are as serving engines expect; ``norm_before_residual`` and ``qk_norm`` are for heads
trained by speculators, which vLLM alone loads.

Shape suffixes: B batch, T positions, D width, X taps concatenated.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn
from transformers import LlamaConfig

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.eagle import AutoregressiveDrafter
from headstart.heads.layers.cached_layers import CachedStack
from headstart.heads.layers.decoder_layer import DecoderLayer, Norm, NormedLayer, NormedPairLayer, PairLayer, Rotary
from headstart.heads.layers.start_values import (
    LayerShape,
    LinearFit,
    engine_fields,
    layer_weights,
    llama_like,
    probe,
    size_of,
    start_fusion,
    tap_sizes,
)
from headstart.heads.own_readout import OwnReadoutConfig, OwnReadoutDrafter
from headstart.support.config import Depth, Layers, Size
from headstart.support.errors import UserError

SECOND_NORM, ITS_COPY = "layers.1.input_layernorm.weight", "layers.1.hidden_norm.weight"
"""The second layer's input norm: vLLM reads the first name, SGLang and TensorRT-LLM the second, so it is stored under both."""


class FusedTapsConfig(OwnReadoutConfig):
    """Arguments of EAGLE-3 and of heads that change how it drafts."""

    taps: tuple[int, ...] | None = None
    """Layers whose residual stream is read, counted from 0, the embedding (null: ``(2, L//2, L-3)``)."""
    intermediate_size: Size | None = None
    """Width of the feed-forward part (null: the backbone's)."""
    layers: Layers = 1
    """Decoder layers; a later one reads the output of the one before."""
    sliding_window: Annotated[int, Ge(1)] | None = None
    """Positions up to its own that a position attends to, in training and decoding; at least ``depth`` (null: all)."""
    fc_norm: bool = False
    """Norm each tap before they are fused (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """Norm the concatenated taps before they are fused, with one norm over all of them."""
    norm_before_residual: bool = False
    """The normed state enters the residual stream, as in heads trained by speculators; of the engines only vLLM computes this."""
    qk_norm: bool = False
    """Norm queries and keys per head, as in Qwen3; of the engines only vLLM computes this."""
    layer: LayerShape | None = None
    """Shape of the decoder layers (null: the backbone's); heads trained elsewhere may differ in it."""


class FusedTapsDrafter(AutoregressiveDrafter, OwnReadoutDrafter):
    """Base class: decoder layers over pairs of embeddings and fused taps, with an output layer of their own."""

    config: FusedTapsConfig
    reads_hidden = False
    readout_lr_ratio = 0.3

    def __init__(self, backbone: Backbone, config: FusedTapsConfig) -> None:
        taps = _taps(config.taps, backbone.num_layers)
        super().__init__(backbone, config.model_copy(update={"taps": taps}))
        _require_consistent(config)
        self.taps = taps
        self.layer_config: LlamaConfig = llama_like(backbone, config.intermediate_size, config.layer)
        D, eps = backbone.dim, self.layer_config.rms_norm_eps
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(D, eps=eps) for _ in taps)
        if config.norm_before_fc:
            self.input_norm = Norm(len(taps) * D, eps=eps)
        self.fc = nn.Linear(len(taps) * D, D, bias=False)
        first, later = (NormedPairLayer, NormedLayer) if config.qk_norm else (PairLayer, DecoderLayer)
        self.midlayer = first(self.layer_config, config.norm_before_residual)
        further = {str(i): later(self.layer_config) for i in range(1, config.layers)}
        if further:
            self.layers = nn.ModuleDict(further)
        self.norm = Norm(D, eps=eps)
        self.lm_head = nn.Linear(D, self.draft_vocab, bias=False)
        self.cached = CachedStack([self.midlayer, *further.values()], Rotary(self.layer_config), config.sliding_window)

    def output_layers(self) -> list[nn.Linear]:
        return [self.lm_head]

    def init_from(self, backbone: Backbone) -> None:
        """Initialise the fused state as the deepest tap plus small random parts of all taps, as large as the backbone's final hidden
        state; the layers as the backbone's last ones if the shapes agree; and the output layer as the backbone's.

        What a layer adds is scaled as the residual stream is, which in the backbone is some ten times as large as the state here.
        """
        super().init_from(backbone)
        features = probe(backbone, tuple(sorted({*self.taps, backbone.num_layers})))
        assert features.taps is not None
        start_fusion(self.fc.weight, self._normed(features.concatenated(self.taps)))
        self.fc.weight *= size_of(features.hidden_BTD)
        for i, cached in enumerate(self.cached.layers):
            from_end = i - len(self.cached.layers)
            start = layer_weights(backbone, from_end) if backbone.num_layers + from_end >= 0 else None
            if start is not None and cached.layer.start_as(start[0]):
                self.norm.weight.copy_(start[1])
                residual = self.midlayer.residual(features.hidden_BTD.to(self.midlayer.dtype))
                cached.layer.scale_outputs(size_of(residual) / size_of(features.taps[backbone.num_layers]))

    @property
    def start_positions(self) -> int:
        return LinearFit.enough(self.fc.in_features)

    @torch.no_grad()
    def fit_start(self, features: Iterator[Features]) -> str:
        """Fit the fused state to the backbone's final hidden state of the next position: what later depths feed back in its place."""
        fit = LinearFit(self.fc.in_features, self.fc.out_features, self.fc.weight.device)
        for batch in features:
            document_BT = torch.zeros_like(batch.tokens_BT) if batch.document_BT is None else batch.document_BT
            before_BN, at_BN, next_BN = (document_BT[:, i : document_BT.shape[1] - 2 + i] for i in range(3))
            chosen_BN = (at_BN >= 0) & (at_BN == before_BN) & (at_BN == next_BN)  # not the first position, which is often an outlier
            fit.add(self._normed(batch.concatenated(self.taps))[:, 1:-1][chosen_BN], batch.hidden_BTD[:, 2:][chosen_BN])
        if not fit.positions:
            return ""
        weight_DX, explained = fit.solve()
        self.fc.weight.copy_(weight_DX)
        return f"fused taps fitted to the next final hidden state on {fit.positions:,} positions ({explained:.0%} of its size)"

    def input_sizes(self) -> dict[str, list[float]]:
        return {} if self.config.fc_norm or self.config.norm_before_fc else {"fc.weight": tap_sizes(self.backbone, self.taps)}

    def _normed(self, taps_BTX: Tensor) -> Tensor:
        """Norm the concatenated taps as the configuration says."""
        if self.config.norm_before_fc:
            taps_BTX = self.input_norm(taps_BTX)
        if self.config.fc_norm:
            parts = taps_BTX.split(self.fc.out_features, -1)
            taps_BTX = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return taps_BTX

    def states(self, features: Features, index_BT: Tensor | None = None) -> Tensor:
        """Concatenate and project the tapped layers."""
        return self.fc(self._normed(features.concatenated(self.taps, index_BT)).to(self.fc.weight.dtype))

    def streams(self, embedded_BTD: Tensor, state_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return embedded_BTD, self.midlayer.residual(state_BTD)

    def output_state(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    @abstractmethod
    def engine_config(self) -> dict[str, Any]:
        """Return a configuration for all engines that load EAGLE-3, with taps counted in both conventions in use."""
        config, window = self.config, self.config.sliding_window
        norms = config.model_dump(include={"fc_norm", "norm_before_fc"})
        sliding = {} if window is None else {"sliding_window": window, "layer_types": ["sliding_attention"] * config.layers}
        eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps]}
        return engine_fields(self.layer_config, self.fc.weight.dtype) | {
            "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
            "num_hidden_layers": config.layers,
            "draft_vocab_size": self.draft_vocab,
            "norm_before_residual": config.norm_before_residual,
            "num_aux_hidden_states": len(self.taps),
            "eagle_aux_hidden_state_layer_ids": list(self.taps),
            "eagle_config": eagle | ({"norm_before_fc": True} if config.norm_before_fc else {}),
            **{name: True for name, used in norms.items() if used},
            **sliding,
        }


class Eagle3(FusedTapsDrafter):
    """One or two layers, applied once per depth to their own output."""

    class Config(FusedTapsConfig):
        depth: Depth = 5
        """Passes of the training-time test: tokens drafted beyond the root."""
        deeper_share: Annotated[float, Gt(0), Le(1)] = 1.0
        """Share of the label positions, drawn anew at each step, at which depths after the first are trained."""
        layers: Annotated[int, Ge(1), Le(2)] = 1
        """Decoder layers; the second reads the first one's output."""
        norm_output: bool = True
        """Feed back the state after the final norm, as EAGLE-3.1 (false: before it, as the original EAGLE-3)."""

    config: Config
    fixed_arguments = ("norm_before_residual", "sliding_window", "layer")

    def __init__(self, backbone: Backbone, config: Config) -> None:
        super().__init__(backbone, config)
        self.deeper_share = config.deeper_share

    def next_state(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden

    def engine_config(self) -> dict[str, Any]:
        return super().engine_config() | ({"norm_output": True} if self.config.norm_output else {})

    def tensors(self) -> dict[str, Tensor]:
        tensors = super().tensors()
        return tensors | {ITS_COPY: tensors[SECOND_NORM].clone()} if SECOND_NORM in tensors else tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        copy = tensors.get(ITS_COPY)
        if copy is not None and not torch.equal(copy, tensors.get(SECOND_NORM, copy)):
            raise UserError(f"{ITS_COPY} and {SECOND_NORM} differ, but engines read either as the same norm: the checkpoint is damaged")
        super().load_tensors({name: tensor for name, tensor in tensors.items() if name != ITS_COPY or self.config.layers == 1})


def _require_consistent(config: FusedTapsConfig) -> None:
    """Raise UserError for arguments that exclude each other."""
    if config.sliding_window is not None and config.sliding_window < config.depth:
        window, depth = config.sliding_window, config.depth
        raise UserError(f"drafter.sliding_window is at least drafter.depth={depth}, the length of a draft; got {window}")
    if config.fc_norm and config.norm_before_fc:
        raise UserError("drafter.fc_norm and drafter.norm_before_fc both norm the taps; set either to false")


def _taps(taps: tuple[int, ...] | None, num_layers: int) -> tuple[int, ...]:
    chosen = sorted(set(taps)) if taps is not None else [2, num_layers // 2, num_layers - 3]
    if taps is None and (num_layers < 6 or len(set(chosen)) < 3):
        chosen = sorted({1, num_layers // 2, num_layers - 1} - {0}) if num_layers > 1 else [num_layers]
    if not chosen or any(not 0 <= tap <= num_layers for tap in chosen):
        raise UserError(f"drafter.taps are layer counts from 0 (the embedding) to {num_layers}; got {taps!r}")
    return tuple(chosen)
