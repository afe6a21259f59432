"""A Llama-like decoder layer over one sequence, from tensors by name, and the one with gated attention of Qwen3-Next and Qwen3.5.

Rotary embeddings are as configuration files state them: default, linear, llama3 and yarn (2309.00071), by transformers' frequencies.

Shape suffixes: T new positions, S all positions, D width, X width of the attention's input, H heads, C head width,
R rotated width of a head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Tensors = Mapping[str, Tensor]
KeysValues = tuple[Tensor, Tensor]
"""``[S, H, C]`` each."""
BASIC = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class Rope:
    """Base and scaling of the frequencies."""

    theta: float = 10000.0
    kind: str = "default"
    numbers: tuple[tuple[str, float], ...] = ()
    """The scaling's own, such as ``factor``."""
    share: float = 1.0
    """The share of a head that is rotated."""


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Read a configuration's rotary embedding, under transformers 5's key or the older ones."""
    stated = _stated(config)
    scaling = stated or config.get("rope_scaling") or {}
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    assert kind in ("default", "linear", "llama3", "yarn"), kind
    theta = stated.get("rope_theta") or config.get("rope_theta") or 10000.0
    share = stated.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    own = sorted((name, value) for name, value in scaling.items() if name not in BASIC and isinstance(value, int | float))
    return Rope(float(theta), kind, tuple(own) if kind != "default" else (), float(share))


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any]:
    stated = config.get("rope_parameters") or {}
    return stated.get("full_attention") or {} if "full_attention" in stated else stated


def rotate(x_THC: Tensor, positions_T: Tensor, rope: Rope) -> Tensor:
    """Rotate the first R entries of each head; entry i is paired with entry i + R / 2."""
    width = int(x_THC.shape[-1] * rope.share)
    frequencies, scale = _frequencies(width, rope)
    angles_TR = positions_T[:, None].float() * frequencies.repeat(2)
    part_THR, rest = x_THC[..., :width], x_THC[..., width:]
    low, high = part_THR.chunk(2, -1)
    turned = part_THR * angles_TR.cos()[:, None] + torch.cat([-high, low], -1) * angles_TR.sin()[:, None]
    return torch.cat([turned * scale, rest], -1)


@cache
def _frequencies(width: int, rope: Rope) -> tuple[Tensor, float]:
    """Return ``[width / 2]`` radians per position, and the factor on cosines and sines."""
    if rope.kind == "default":
        return 1.0 / rope.theta ** (torch.arange(0, width, 2).float() / width), 1.0
    numbers = dict(rope.numbers)
    length = int(numbers.get("original_max_position_embeddings", 2048) * numbers["factor"])
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **numbers}
    config = LlamaConfig(head_dim=width, max_position_embeddings=length, rope_parameters=parameters)
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    return frequencies, float(scale)


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer that its weights do not tell alone."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope: Rope
    layers: int = 1
    windows: tuple[int | None, ...] = (None,)
    """For each layer, the positions up to its own that a position attends to; None: all."""
    bias: bool = False
    """The projections to queries, keys and values have a bias."""


def read_shape(config: Mapping[str, Any], layers: int | None = None) -> LayerShape:
    """Read a Llama-like configuration."""
    assert config.get("hidden_act", "silu") == "silu"
    heads, count = config["num_attention_heads"], layers or config.get("num_hidden_layers") or 1
    return LayerShape(
        hidden=config["hidden_size"], heads=heads, kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads, intermediate=config["intermediate_size"],
        eps=float(config.get("rms_norm_eps", 1e-6)), rope=read_rope(config), layers=count, windows=_windows(config, count),
        bias=bool(config.get("attention_bias")),
    )  # fmt: skip


def _windows(config: Mapping[str, Any], count: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return (None,) * count
    kinds = config.get("layer_types") or ["sliding_attention"] * count
    return tuple(window if kind == "sliding_attention" else None for kind in (*kinds, *kinds[-1:] * count)[:count])


def layer_shapes(shape: LayerShape, width: int, head_norms: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a layer but its input norm, by Llama's names; ``width`` is that of the attention's input."""
    D, C, inner = shape.hidden, shape.head_dim, shape.intermediate
    rows = {"q": shape.heads * C, "k": shape.kv_heads * C, "v": shape.kv_heads * C}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj.weight": (size, width) for name, size in rows.items()}
    shapes |= {"self_attn.o_proj.weight": (D, rows["q"]), "post_attention_layernorm.weight": (D,)}
    shapes |= {"mlp.gate_proj.weight": (inner, D), "mlp.up_proj.weight": (inner, D), "mlp.down_proj.weight": (D, inner)}
    if head_norms:
        shapes |= {"self_attn.q_norm.weight": (C,), "self_attn.k_norm.weight": (C,)}
    if shape.bias:
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
    return shapes


def under(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def linear(tensors: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def norm(tensors: Tensors, name: str, x: Tensor, eps: float) -> Tensor:
    """RMSNorm by the weight ``name.weight``."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * tensors[f"{name}.weight"]


def queries(tensors: Tensors, x_TX: Tensor, shape: LayerShape, positions_T: Tensor) -> Tensor:
    query_THC = linear(tensors, "self_attn.q_proj", x_TX).unflatten(-1, (shape.heads, shape.head_dim))
    if "self_attn.q_norm.weight" in tensors:
        query_THC = norm(tensors, "self_attn.q_norm", query_THC, shape.eps)
    return rotate(query_THC, positions_T, shape.rope)


def keys_values(tensors: Tensors, x_TX: Tensor, shape: LayerShape, positions_T: Tensor) -> KeysValues:
    key_THC, value_THC = (linear(tensors, f"self_attn.{name}_proj", x_TX).unflatten(-1, (shape.kv_heads, shape.head_dim)) for name in "kv")
    if "self_attn.k_norm.weight" in tensors:
        key_THC = norm(tensors, "self_attn.k_norm", key_THC, shape.eps)
    return rotate(key_THC, positions_T, shape.rope), value_THC


def attend(query_THC: Tensor, key_SHC: Tensor, value_SHC: Tensor, mask_TS: Tensor) -> Tensor:
    """Return the mixed values ``[T, H * C]``; each key head serves several heads of queries."""
    groups = query_THC.shape[1] // key_SHC.shape[1]
    key_SHC, value_SHC = key_SHC.repeat_interleave(groups, 1), value_SHC.repeat_interleave(groups, 1)
    scores_HTS = torch.einsum("thc,shc->hts", query_THC, key_SHC) * query_THC.shape[-1] ** -0.5
    weights_HTS = scores_HTS.masked_fill(~mask_TS, -torch.inf).softmax(-1)
    return torch.einsum("hts,shc->thc", weights_HTS, value_SHC).flatten(1)


def finish(tensors: Tensors, residual_TD: Tensor, mixed: Tensor, eps: float) -> Tensor:
    """Add the attention's output and the feed-forward part to the residual stream."""
    residual_TD = residual_TD + linear(tensors, "self_attn.o_proj", mixed)
    x_TD = norm(tensors, "post_attention_layernorm", residual_TD, eps)
    gated = F.silu(linear(tensors, "mlp.gate_proj", x_TD)) * linear(tensors, "mlp.up_proj", x_TD)
    return residual_TD + linear(tensors, "mlp.down_proj", gated)


def join(past: KeysValues | None, new: KeysValues) -> KeysValues:
    return new if past is None else (torch.cat([past[0], new[0]]), torch.cat([past[1], new[1]]))


def causal_layer(
    tensors: Tensors, streams: Sequence[Tensor], shape: LayerShape, window: int | None, past: KeysValues | None
) -> tuple[Tensor, KeysValues]:
    """Return the layer's output ``[T, D]`` at new positions that follow ``past``, and all keys and values.

    ``streams``: the attention's input ``[T, X]`` and the residual stream ``[T, D]``.
    """
    x_TX, residual_TD = streams
    first = 0 if past is None else len(past[0])
    positions_T, positions_S = torch.arange(first, first + len(x_TX)), torch.arange(first + len(x_TX))
    both = join(past, keys_values(tensors, x_TX, shape, positions_T))
    distance_TS = positions_T[:, None] - positions_S
    mask_TS = (distance_TS >= 0) & (distance_TS < (window or 1 << 40))
    mixed = attend(queries(tensors, x_TX, shape, positions_T), *both, mask_TS)
    return finish(tensors, residual_TD, mixed, shape.eps), both


# Gated attention: the query projection also gives a gate, and norms are stored less one.

GATED_NORMS = ("layernorm.weight", "_norm.weight")


def zero_centred_norm(tensors: Tensors, name: str, x: Tensor, eps: float) -> Tensor:
    """RMSNorm that scales by one plus the weight."""
    return norm({f"{name}.weight": 1 + tensors[f"{name}.weight"]}, name, x, eps)


def gated_layer(
    tensors: Tensors, streams: Sequence[Tensor], shape: LayerShape, window: int | None, past: KeysValues | None
) -> tuple[Tensor, KeysValues]:
    """Return the layer's output ``[T, D]`` and all keys and values, as `causal_layer` does; it has no window."""
    assert window is None
    x_TX, residual_TD = streams
    plain = {name: tensor + 1 if name.endswith(GATED_NORMS) else tensor for name, tensor in tensors.items()}
    first = 0 if past is None else len(past[0])
    positions_T = torch.arange(first, first + len(x_TX))
    query_THC, gate_THC = linear(plain, "self_attn.q_proj", x_TX).unflatten(-1, (shape.heads, 2 * shape.head_dim)).chunk(2, -1)
    query_THC = rotate(norm(plain, "self_attn.q_norm", query_THC, shape.eps), positions_T, shape.rope)
    both = join(past, keys_values(plain, x_TX, shape, positions_T))
    mask_TS = torch.arange(first + len(x_TX)) <= positions_T[:, None]
    mixed = attend(query_THC, *both, mask_TS) * gate_THC.flatten(1).sigmoid()
    return finish(plain, residual_TD, mixed, shape.eps), both
