"""Weights of exported heads in 8 bits, in the layout of compressed-tensors: the linear layers of the decoder layers, a scale per row.

Weights alone are quantised; engines multiply them with activations in the model's dtype. ``fp8`` stores ``weight`` (float8_e4m3fn) and
``weight_scale``; ``int8`` stores four values in each int32 of ``weight_packed``, ``weight_scale`` and ``weight_shape``. Norms, the output
layer and ``fc`` stay as they are: SGLang's ``fc`` is an ordinary linear layer, which would take 8-bit values for weights. What others
quantise in that layout is read too, in 4 bits and with scales per group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from headstart.support.errors import UserError

How = Literal["int8", "fp8"]
QUANTIZED = re.compile(r"(midlayer|layers\.\d+)\.(self_attn|mlp)\.\w+_proj\.weight")
FORMATS: dict[How, str] = {"int8": "pack-quantized", "fp8": "float-quantized"}
READ = (*FORMATS.values(), "int-quantized", "naive-quantized")
"""Formats of compressed-tensors that are read: values of one number each with a scale."""
ASYMMETRIC = ("_zero_point", "_g_idx")
PARTS = ("_scale", "_shape", *ASYMMETRIC)
"""Ends of the names of what stands beside a weight's values."""
GIVE = "give the heads that were quantised"
LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The value that a row's largest weight is mapped to."""
IGNORED = ["re:.*fc$", "re:.*lm_head$", "re:.*embed_tokens$", "re:.*markov_head.*", "re:.*confidence_head.*"]


def quantized(config: Mapping[str, Any], tensors: Mapping[str, Tensor], how: How) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return both with the weights of the decoder layers' linear layers in 8 bits. Raises UserError if rows cannot be packed."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if QUANTIZED.fullmatch(name):
            if how == "int8" and tensor.shape[1] % 4:
                raise UserError(f"{name} has rows of {tensor.shape[1]} values; int8 weights are packed by four: use --quantize fp8")
            found |= {f"{name}{suffix}": part for suffix, part in _quantize(tensor, how).items()}
        else:
            found[name] = tensor
    assert len(found) > len(tensors), "no tensor of the layout has a name that is quantised"
    return {**config, "quantization_config": _config(how)}, found


def stated_format(config: Mapping[str, Any]) -> str | None:
    """Return how the weights of a folder are quantised; None: not at all. Raises UserError for a way that is not read here."""
    stated = config.get("quantization_config")
    if not stated:
        return None
    how, method = stated.get("format"), stated.get("quant_method")
    sparse = (stated.get("sparsity_config") or {}).get("format") not in (None, "dense")
    if method != "compressed-tensors" or how not in READ or sparse or stated.get("transform_config"):
        named = f"{method} {how or ''}".strip() + (" with other weights left out or rotated" if how in READ else "")
        raise UserError(f"the heads are quantised by {named}; read are compressed-tensors' {', '.join(READ)}: {GIVE}")
    return str(how)


def own_way(config: Mapping[str, Any]) -> How | None:
    """Return how `quantized` wrote a folder; None: it did not."""
    return next((how for how in FORMATS if config.get("quantization_config") == _config(how)), None)


def dequantized(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a quantised folder with the weights that the values stand for, in fp32; others are as they are.

    Values of 4 or 8 bits with a scale per tensor, row or block of a row. Raises UserError for any others.
    """
    assert stated_format(config) is not None
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        base = name.removesuffix("_packed")
        scaled = next((name.removesuffix(end) for end in PARTS if name.endswith(end)), None)
        if f"{base}_scale" in tensors:
            values = tensor if name == base else _unpacked(name, tensor, tensors.get(f"{base}_shape"))
            found[base] = values.float() * _spread(name, tensors[f"{base}_scale"], values.shape)
        elif scaled is None or f"{scaled}_scale" not in tensors:
            found[name] = tensor
        elif name.endswith(ASYMMETRIC) and bool(tensor.any()):
            raise UserError(f"{name}: values with zero points or in the order of activations are not read; {GIVE}")
    return found


def _unpacked(name: str, packed_OP: Tensor, shape: Tensor | None) -> Tensor:
    """Return the whole numbers of a weight, of which each int32 holds 4 or 8, the first one in its lowest bits."""
    rows, width = (0, 0) if shape is None or len(shape) != 2 else shape.tolist()
    bits = next((bits for bits in (8, 4) if packed_OP.shape == (rows, -(-width * bits // 32))), None)
    if bits is None or packed_OP.dtype != torch.int32:
        raise UserError(f"{name} {list(packed_OP.shape)} holds no values of 4 or 8 bits for a weight of {rows} x {width}; {GIVE}")
    parts = packed_OP[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32) & (1 << bits) - 1
    return parts.flatten(1)[:, :width] - (1 << bits - 1)


def _spread(name: str, scale: Tensor, shape: torch.Size) -> Tensor:
    """Return a weight's scales, one for each value or one that fits all of a dimension."""
    scale = scale.float().reshape(scale.shape if scale.dim() == 2 else (-1, 1))
    if scale.dim() != len(shape) or any(size % count for size, count in zip(shape, scale.shape, strict=True)):
        raise UserError(f"{name}: {list(scale.shape)} scales do not divide a weight of {list(shape)} evenly; {GIVE}")
    for dim, size in enumerate(shape):
        scale = scale.repeat_interleave(size // scale.shape[dim], dim) if scale.shape[dim] > 1 else scale
    return scale


def _quantize(weight_OI: Tensor, how: How) -> dict[str, Tensor]:
    """Return the tensors that replace a weight, by the end of their names."""
    weight = weight_OI.detach().float()
    scale = (weight.abs().amax(1, keepdim=True) / LARGEST[how]).clamp(min=torch.finfo(torch.float32).tiny)
    if how == "fp8":
        return {"": (weight / scale).clamp(-LARGEST[how], LARGEST[how]).to(torch.float8_e4m3fn), "_scale": scale}
    scale = scale.to(weight_OI.dtype)  # the dtype in which it is multiplied
    values = (weight / scale.float()).round().clamp(-128, 127)
    packed = (values + 128).to(torch.uint8).contiguous().view(torch.int32)
    return {"_packed": packed, "_scale": scale, "_shape": torch.tensor(weight.shape, dtype=torch.int64)}


def _config(how: How) -> dict[str, Any]:
    """Return ``quantization_config`` of ``config.json``."""
    weights = {"num_bits": 8, "type": "int" if how == "int8" else "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[how],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": IGNORED,
        "kv_cache_scheme": None,
    }
