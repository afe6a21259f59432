"""Weights of exported heads in 8 bits, in the layout of compressed-tensors: the linear layers of the decoder layers, a scale per row.

Weights alone are quantised; engines multiply them with activations in the model's dtype. ``fp8`` stores ``weight`` (float8_e4m3fn) and
``weight_scale``; ``int8`` stores four values in each int32 of ``weight_packed``, ``weight_scale`` and ``weight_shape``. Norms, the output
layer and ``fc`` stay as they are: SGLang's ``fc`` is an ordinary linear layer, which would take 8-bit values for weights.
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
FORMATS = {"int8": "pack-quantized", "fp8": "float-quantized"}
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
    if stated.get("quant_method") != "compressed-tensors" or stated.get("format") not in FORMATS.values():
        how = f"{stated.get('quant_method')} {stated.get('format') or ''}".strip()
        raise UserError(f"the heads are quantised by {how}; Headstart reads its own int8 and fp8 only: give the heads that were quantised")
    return str(stated["format"])


def dequantized(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a quantised folder with the weights that the 8-bit values stand for, in fp32; others are as they are.

    Raises UserError for a quantisation that is not one of `quantized`.
    """
    assert stated_format(config) is not None
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        base = name.removesuffix("_packed").removesuffix("_scale").removesuffix("_shape")
        if f"{base}_scale" not in tensors:
            found[name] = tensor
        elif name in (base, f"{base}_packed"):
            packed = name != base
            values = tensor.view(torch.uint8)[:, : int(tensors[f"{base}_shape"][1])].short() - 128 if packed else tensor
            found[base] = values.float() * tensors[f"{base}_scale"].float()
    return found


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
