"""What layers of heads take from the backbone: shapes (or as an argument says) with the configuration that engines read, and start values.

Layers start as the backbone's decoder layers, if their parameters are named as in Llama; fused taps and layers with normed queries and keys
have start values of their own.

Shape suffixes: T positions, D width, X width of all taps.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from annotated_types import Gt
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import LlamaConfig

from headstart.heads.backbone.adapter import base_parameters, plain_weight
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.layers.decoder_layer import NormedAttention, NormedLayer
from headstart.support.config import Size, StrictModel
from headstart.support.devices import spread
from headstart.support.errors import UserError, cause


class LayerShape(StrictModel):
    """What a decoder layer of heads has otherwise than the backbone, as heads trained elsewhere often do."""

    num_attention_heads: Size | None = None
    """Attention heads (null: the backbone's)."""
    num_key_value_heads: Size | None = None
    """Heads of keys and values (null: the backbone's)."""
    head_dim: Size | None = None
    """Width of an attention head (null: the backbone's)."""
    rms_norm_eps: Annotated[float, Gt(0)] | None = None
    """Added to the mean square in norms (null: the backbone's)."""
    attention_bias: bool = False
    """Biases in the projections to queries, keys and values."""
    rope_parameters: dict[str, Any] | None = None
    """Rotary embedding as in a config.json: rope_type, rope_theta and so on (null: the backbone's)."""


def llama_like(backbone: Backbone, intermediate_size: int | None, shape: LayerShape | None = None) -> LlamaConfig:
    """Configure one Llama layer with the backbone's widths, attention heads, context and rotary base, or those of ``shape``.

    Raises UserError for a shape that cannot be built.
    """
    config: dict[str, Any] = backbone.config.to_dict()
    given = {} if shape is None else shape.model_dump(exclude_none=True)
    heads: int = config.get("num_attention_heads") or getattr(backbone.config, "num_attention_heads", None) or max(backbone.dim // 64, 1)
    kv_heads, width, inner = config.get("num_key_value_heads") or heads, config.get("head_dim"), config.get("intermediate_size")
    if backbone.dim % heads:  # as GLM-4.5's 96 in 5,120 or GLM-4.7-Flash's 20 in 2,048, which engines refuse in a Llama's layer
        most = backbone.dim // (width or backbone.dim // heads)
        heads = next(count for count in range(most, 0, -1) if backbone.dim % count == 0)
        kv_heads = math.gcd(kv_heads, heads)
    rope = config.get("rope_parameters")
    if not rope or "rope_type" not in rope:
        rope = (rope or {}).get("full_attention") or {"rope_type": "default", "rope_theta": 10000.0}
    own: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width or backbone.dim // heads,
        "rms_norm_eps": config.get("rms_norm_eps") or 1e-6,
        "rope_parameters": _steady(rope),
    }
    try:
        return LlamaConfig(
            vocab_size=backbone.vocab,
            hidden_size=backbone.dim,
            intermediate_size=intermediate_size or (inner[-1] if isinstance(inner, list) else inner) or 4 * backbone.dim,
            num_hidden_layers=1,
            max_position_embeddings=backbone.max_positions or 2048,
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=config.get("eos_token_id"),
            pad_token_id=config.get("pad_token_id"),
            tie_word_embeddings=False,
            **own | given,
        )
    except StrictDataclassError as error:
        raise UserError(f"drafter.layer={given} is no shape of a decoder layer of width {backbone.dim}: {cause(error, 200)}") from None


def _steady(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters with the same frequencies at every length, of a kind that engines read.

    LongRoPE's and dynamic NTK's change within a text, and engines do not agree on when: vLLM by the longest text that it may serve.
    Gemma-4's proportional ones are the default ones where whole heads are rotated. Ministral-3's scale of queries is no part of them.
    """
    kind = rope["rope_type"]
    if kind in ("longrope", "proportional") or "dynamic" in kind:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {key: value for key, value in rope.items() if key != "llama_4_scaling_beta"}


def engine_fields(config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of a head's ``config.json`` that serving engines expect of any Llama."""
    values = config.to_dict()
    keep = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_parameters", "attention_bias",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    # A head's layer rotates whole attention heads, whatever share of theirs the backbone's layers rotate.
    rope = values["rope_parameters"] = {key: value for key, value in values["rope_parameters"].items() if key != "partial_rotary_factor"}
    scaled = {key: value for key, value in rope.items() if key != "rope_theta"} if rope["rope_type"] != "default" else None
    name = str(dtype).removeprefix("torch.")
    return {key: values[key] for key in keep} | {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaled,
        "dtype": name,
        "torch_dtype": name,
    }


def probe(backbone: Backbone, taps: tuple[int, ...] = ()) -> Features:
    """Return the backbone's features of a few tokens spread over the vocabulary."""
    return backbone.read(probe_tokens(backbone), taps=taps)


def probe_tokens(backbone: Backbone) -> Tensor:
    """Return the tokens of `probe`, ``[1, T]``."""
    count = min(64, backbone.max_positions or 64)
    return torch.tensor([spread(0, backbone.vocab - 1, count)], device=backbone.device)


@torch.no_grad()
def start_fusion(weight_DX: Tensor, taps_1TX: Tensor) -> None:
    """Add the deepest of the concatenated taps to the random parts of all, each scaled to unit size.

    Without the scaling, residual streams, whose entries are in the tens, would dominate what is computed of them.
    """
    D = len(weight_DX)
    weight_DX[:, -D:] += torch.eye(D, dtype=weight_DX.dtype, device=weight_DX.device)
    for i, size in enumerate(_sizes(taps_1TX, D)):
        weight_DX[:, i * D : (i + 1) * D] /= size


class LinearFit:
    """Ridge regression of targets ``[T, D]`` on inputs ``[T, X]``, from sums over positions; each input is scaled to unit size first."""

    CHUNK = 2048
    """Positions multiplied at a time, in fp32: exact enough beside the ridge, and much faster than fp64 on most accelerators."""
    RIDGE = 1e-2
    """Variance that counts as noise, as a share of an input's."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        device = torch.device("cpu") if device.type == "mps" else device  # which has no fp64
        self.products_XX = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self.products_XD = torch.zeros(inputs, outputs, dtype=torch.float64, device=device)
        self.squares, self.positions = 0.0, 0

    @staticmethod
    def enough(inputs: int) -> int:
        """Return the number of positions that are enough for so many inputs."""
        return max(12_000, 4 * inputs)

    def add(self, inputs_TX: Tensor, targets_TD: Tensor) -> None:
        for x_TX, y_TD in zip(inputs_TX.split(self.CHUNK), targets_TD.split(self.CHUNK), strict=True):
            x_TX, y_TD = x_TX.float(), y_TD.float()
            self.products_XX += (x_TX.mT @ x_TX).to(self.products_XX.device)
            self.products_XD += (x_TX.mT @ y_TD).to(self.products_XD.device)
            self.squares += y_TD.square().sum().item()
            self.positions += len(x_TX)

    def solve(self) -> tuple[Tensor, float]:
        """Return the weight ``[D, X]``, and the share of the targets' squares that it explains. Nothing can be added afterwards."""
        size_X, noise = (self.products_XX.diagonal() / self.positions).sqrt().clamp(min=1e-6), self.RIDGE * self.positions
        self.products_XX.div_(size_X).div_(size_X[:, None]).diagonal().add_(noise)
        target_XD = self.products_XD / size_X[:, None]
        scaled_XD = torch.cholesky_solve(target_XD, torch.linalg.cholesky(self.products_XX))
        explained = (scaled_XD * target_XD).sum() + noise * scaled_XD.square().sum()
        return (scaled_XD / size_X[:, None]).mT, explained.item() / max(self.squares, 1e-12)


@torch.no_grad()
def size_of(x_TD: Tensor) -> float:
    """Return the root mean square of a position, the median over positions: the first is often an outlier."""
    return max(x_TD.contiguous().float().square().mean(-1).sqrt().median().item(), 1e-6)


@torch.no_grad()
def tap_sizes(backbone: Backbone, taps: tuple[int, ...]) -> list[float]:
    """Return each tap's size as a power of two, and 1 for a backbone that is trained, whose taps change."""
    if backbone.trainable:
        return [1.0] * len(taps)
    return [2.0 ** round(math.log2(size)) for size in _sizes(probe(backbone, taps).concatenated(taps), backbone.dim)]


def _sizes(taps_1TX: Tensor, dim: int) -> list[float]:
    """Return the size of each of the concatenated taps."""
    return [size_of(tap_1TD) for tap_1TD in taps_1TX.split(dim, -1)]


@torch.no_grad()
def start_normed(layer: NormedLayer, backbone: Backbone, index: int) -> Tensor | None:
    """Copy the backbone's layer ``index`` and return the weight of its final norm; None, and nothing copied, if the shapes differ.

    The input norm's weight goes into the projections, which also project a context that this norm does not see. Where the backbone norms
    neither queries nor keys, their norms get the size that they have there.
    """
    found = layer_weights(backbone, index, query_norms=True)
    if found is None or not layer.start_as(found[0]):
        return None
    attn = layer.self_attn
    assert isinstance(attn, NormedAttention)
    for projection in (attn.q_proj, attn.k_proj, attn.v_proj):
        projection.weight *= layer.input_layernorm.weight
    layer.input_layernorm.weight.fill_(1.0)
    if not QUERY_NORMS & {*found[0]}:
        x_1TD = layer.inputs(probe(backbone, (index,)).concatenated((index,)).to(layer.dtype))
        for projection, norm in ((attn.q_proj, attn.q_norm), (attn.k_proj, attn.k_norm)):
            norm.weight.fill_(projection(x_1TD).unflatten(-1, (-1, attn.head_dim)).square().mean(-1).sqrt().median())
    return found[1]


LAYER = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"), *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight", "post_attention_layernorm.weight",
}  # fmt: skip
NORM = "norm.weight"
"""The norm after the last layer."""
QUERY_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


@torch.no_grad()
def layer_weights(backbone: Backbone, index: int = -1, query_norms: bool = False) -> tuple[dict[str, Tensor], Tensor] | None:
    """Return the weights of a decoder layer (by default the last) by name, and the weight of the final norm; None if the names are
    not Llama's.

    Query and key projections followed by norms (Qwen3) are left out, since their scale differs, unless ``query_norms`` asks for the norms
    too. Weights of norms are the factors they multiply by, also where the backbone stores them less one (Qwen3.5). With a sharded backbone
    all processes must call this.
    """
    names = {name for name in base_parameters(backbone.layers[index], backbone.adapter) if not name.endswith(".bias")}
    decoder = backbone.model.get_decoder()
    final = dict(decoder.named_parameters()).get(NORM)
    norms = names & QUERY_NORMS
    if final is None or names - norms != LAYER or backbone.config.to_dict().get("hidden_act") != "silu":
        return None
    left_out = {*norms, "self_attn.q_proj.weight", "self_attn.k_proj.weight"} if norms and not query_norms else set()
    new_norm: nn.Module = type(decoder.get_submodule("norm"))(1)
    less = 0.0 if new_norm.get_parameter("weight").any() else 1.0  # a weight less one starts at zero
    weights = backbone.layer(index, names - left_out)
    if weights is None:
        return None
    plain = {name: plain_weight(weight) for name, weight in weights.items()}
    return {name: weight + less if weight.dim() == 1 else weight for name, weight in plain.items()}, plain_weight(final) + less
