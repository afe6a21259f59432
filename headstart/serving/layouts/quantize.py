"""Weights of others' heads in 4 or 8 bits, in the layout of compressed-tensors, and the fp32 weights that they stand for.

``weight`` (8 bits a value) or ``weight_packed`` and ``weight_shape`` (several values in each int32) stand beside ``weight_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstart.support.errors import UserError

READ = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
"""Formats of compressed-tensors that are read: values of one number each with a scale."""
ASYMMETRIC = ("_zero_point", "_g_idx")
PARTS = ("_scale", "_shape", *ASYMMETRIC)
"""Ends of the names of what stands beside a weight's values."""
GIVE = "give the heads that were quantised"


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
