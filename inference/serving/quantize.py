"""Weights of exported heads in 8 bits, in the layout of compressed-tensors: the linear layers of the decoder layers, a scale per row.

Weights alone are quantised; engines multiply them with activations in the model's dtype. ``fp8`` stores ``weight`` (float8_e4m3fn) and
``weight_scale``; ``int8`` stores four values in each int32 of ``weight_packed``, ``weight_scale`` and ``weight_shape``. Norms, the output
layer and ``fc`` stay as they are: SGLang's ``fc`` is an ordinary linear layer, which would take 8-bit values for weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from headstart.inference.serving.engines import ENGINES, METHODS
from headstart.inference.serving.layout import Layout
from headstart.support.errors import UserError

How = Literal["int8", "fp8"]
LOADED = "loading run in 0.32.0"
READ = {
    ("vllm", "eagle3"): LOADED,
    ("vllm", "eagle"): LOADED,
    ("vllm", "dflash"): LOADED,
    ("sglang", "eagle3"): "read in the source of commit 03d5a77",
}
"""Engine and method -> how it is known that quantised heads load (tests/engines/test_quantized.py). Their kernels run on a GPU only."""
LAYOUTS = ("eagle3", "eagle", "dflash")
QUANTIZED = re.compile(r"(midlayer|layers\.\d+)\.(self_attn|mlp)\.\w+_proj\.weight")
LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The value that a row's largest weight is mapped to."""
IGNORED = ["re:.*fc$", "re:.*lm_head$", "re:.*embed_tokens$", "re:.*markov_head.*", "re:.*confidence_head.*"]


def require_quantizable(how: How, method: str, layout: str, engine: str | None) -> None:
    """Raise UserError unless some engine (or the one given) reads quantised heads of this method in this layout."""
    reading = [name for name, other in READ if other == method]
    if not reading or layout not in LAYOUTS:
        allowed = ", ".join(METHODS[one] for one in dict.fromkeys(one for _, one in READ))
        raise UserError(
            f"no engine is known to read {how} {METHODS[method]} heads in the layout {layout}; --quantize is for {allowed} heads in the"
            f" layouts {', '.join(LAYOUTS)}: leave it out"
        )
    if engine is not None and engine not in reading:
        others = ", ".join(ENGINES[name] for name in reading)
        raise UserError(f"{ENGINES[engine]} is not known to read {how} {METHODS[method]} heads; known: {others}; leave out --quantize")


def quantize_notes(how: How, method: str) -> list[str]:
    """Return what quantisation changed, and how it is known that engines read it, in one line each."""
    readers = ", ".join(f"{ENGINES[engine]} ({version})" for (engine, other), version in READ.items() if other == method)
    return [
        f"the decoder layers' linear weights are stored in {how}, a scale for each row; fc, norms and the output layer are unchanged",
        f"{how} kernels of engines run on a GPU only and were not run here; known of {readers}: compare acceptance before you serve them",
    ]


def quantized(layout: Layout, how: How) -> Layout:
    """Return the layout with the weights of the decoder layers' linear layers in 8 bits. Raises UserError if rows cannot be packed."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in layout.tensors.items():
        if QUANTIZED.fullmatch(name):
            if how == "int8" and tensor.shape[1] % 4:
                raise UserError(f"{name} has rows of {tensor.shape[1]} values; int8 weights are packed by four: use --quantize fp8")
            tensors |= {f"{name}{suffix}": part for suffix, part in _quantize(tensor, how).items()}
        else:
            tensors[name] = tensor
    assert len(tensors) > len(layout.tensors), "no tensor of the layout has a name that is quantised"
    return replace(layout, config=layout.config | {"quantization_config": _config(how)}, tensors=tensors)


def dequantized(config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the tensors of a quantised folder with the weights that the 8-bit values stand for; others are as they are.

    Raises UserError for a quantisation that is not one of `quantized`.
    """
    stated = config.get("quantization_config") or {}
    if stated.get("quant_method") != "compressed-tensors" or stated.get("format") not in ("pack-quantized", "float-quantized"):
        raise UserError(f"the heads are quantised by {stated.get('quant_method')}; Headstart reads its own int8 and fp8 only")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        base = name.removesuffix("_packed").removesuffix("_scale").removesuffix("_shape")
        if f"{base}_scale" not in tensors:
            found[name] = tensor
        elif name in (base, f"{base}_packed"):
            values = tensor if name == base else tensor.view(torch.uint8).short() - 128
            found[base] = (values.float() * tensors[f"{base}_scale"].float()).to(dtype)
    return found


def _quantize(weight_OI: Tensor, how: How) -> dict[str, Tensor]:
    """Return the tensors that replace a weight, by the end of their names."""
    weight = weight_OI.detach().float()
    scale = (weight.abs().amax(1, keepdim=True) / LARGEST[how]).clamp(min=torch.finfo(torch.float32).tiny)
    if how == "fp8":
        return {"": (weight / scale).clamp(-LARGEST[how], LARGEST[how]).to(torch.float8_e4m3fn), "_scale": scale}
    scale = scale.to(weight_OI.dtype)   # the dtype in which it is multiplied
    values = (weight / scale.float()).round().clamp(-128, 127)
    packed = (values + 128).to(torch.uint8).contiguous().view(torch.int32)
    return {"_packed": packed, "_scale": scale, "_shape": torch.tensor(weight.shape, dtype=torch.int64)}


def _config(how: How) -> dict[str, Any]:
    """Return ``quantization_config`` of ``config.json``."""
    weights = {"num_bits": 8, "type": "int" if how == "int8" else "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if how == "int8" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": IGNORED,
        "kv_cache_scheme": None,
    }
