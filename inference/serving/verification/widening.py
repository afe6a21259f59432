"""Copies a model or head with wider attention heads that compute the same, for attention kernels that refuse narrow ones.

vLLM's CPU kernels take heads of 32 and more; tiny models have 8 or 16. Each rotary pair ``(i, i + d/2)`` of a head of width d moves to the
pair of the wider head, of width w, that is rotated by the same angle; all other coordinates are zero. Queries are multiplied by
``sqrt(w / d)``, since attention divides their products with keys by ``sqrt(w)``. The result is the same up to rounding.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.support.errors import UserError
from headstart.support.json_text import read_json

UNHANDLED = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "q_norm.weight", "k_norm.weight")
"""Tensors of the width of an attention head that are not widened."""


def head_width(config: dict[str, Any]) -> int | None:
    """Return the width of an attention head by a model's ``config.json``; None without attention."""
    if "num_attention_heads" not in config:
        return None
    width: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return width


def write_widened(source: Path, target: Path, width: int) -> Path:
    """Write a copy of the folder ``source`` with attention heads of ``width`` to ``target`` and return it.

    Raises UserError where that is not possible: another kind of rotary embedding, biases or norms of queries and keys, or a width that is
    no multiple of the heads' own.
    """
    config = read_json(source / "config.json", "fetch the model again")
    own, rope = head_width(config), config.get("rope_parameters") or {"rope_type": "default"}
    if own is None or width % own or rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        found = f"it has {own} and the rotary embedding {rope}"
        raise UserError(f"{source} cannot be given attention heads of {width}: {found}; use a larger model")
    target.mkdir(parents=True)
    weights = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if name.endswith(UNHANDLED):
                raise UserError(f"{source} cannot be given attention heads of {width}: {name} is not handled; use a larger model")
            weights[name] = widened(name, weight, own, width)
    for file in source.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, target / file.name)
    (target / "config.json").write_text(json.dumps(config | {"head_dim": width}, indent=1))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def widened(name: str, weight: Tensor, own: int, width: int) -> Tensor:
    """Return a weight with its heads spread over wider ones; weights other than attention's as they are."""
    half = torch.arange(own // 2) * (width // own)
    rotary = torch.cat([half, half + width // 2])
    if name.endswith("q_proj.weight"):
        return _spread(weight * (width / own) ** 0.5, rotary, width)
    if name.endswith("k_proj.weight"):
        return _spread(weight, rotary, width)
    if name.endswith("v_proj.weight"):
        return _spread(weight, torch.arange(own), width)
    if name.endswith("o_proj.weight"):
        return _spread(weight.T, torch.arange(own), width).T.contiguous()
    return weight


def _spread(weight: Tensor, places: Tensor, width: int) -> Tensor:
    """Move the rows of each head to ``places`` of a head of ``width``."""
    wide = weight.new_zeros(len(weight) // len(places), width, weight.shape[1])
    wide[:, places] = weight.reshape(-1, len(places), weight.shape[1])
    return wide.flatten(0, 1)
