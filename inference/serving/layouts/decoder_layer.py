"""What a foreign ``config.json`` states of a decoder layer, as arguments of Headstart's heads, and of the layers that are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.smaller import FAULTS
from headstart.heads.layers.layer_config import LayerShape, llama_like
from headstart.support.errors import UserError

IDS = "eagle_aux_hidden_state_layer_ids"
DECODERS = ("llama", "qwen2", "qwen3", "mistral")
"""Model types whose layers are a Llama's, but for defaults, biases and norms of queries and keys; others are read as Llama."""
NOT_SHAPES = ("architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "quantization_config", "model_type")


def layer_arguments(stated: Mapping[str, Any], backbone: Backbone, path: str) -> dict[str, Any]:
    """Return ``intermediate_size`` and ``layer`` where the stated layer differs from the backbone's. Raises UserError."""
    config = _full_config(stated, path)
    if config["hidden_act"] != "silu":
        raise UserError(f"{path}: hidden_act {config['hidden_act']!r} in config.json; heads here compute silu alone")
    ours = llama_like(backbone, None).to_dict()
    bias = bool(stated.get("qkv_bias", stated.get("attention_bias", False)))  # qkv_bias: SafeAILab
    theirs = {**config, "attention_bias": bias, "rope_parameters": _rope(config)}
    mine = {**ours, "attention_bias": False, "rope_parameters": _rope(ours)}
    shape = {key: theirs[key] for key in LayerShape.model_fields if theirs[key] is not None and theirs[key] != mine[key]}
    arguments: dict[str, Any] = {"layer": shape} if shape else {}
    if config["intermediate_size"] != ours["intermediate_size"]:
        arguments["intermediate_size"] = config["intermediate_size"]
    return arguments


def _full_config(stated: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the configuration with transformers' values for what is not stated. Raises UserError."""
    kind = stated.get("model_type") if stated.get("model_type") in DECODERS else "llama"
    known = {key: value for key, value in stated.items() if key not in NOT_SHAPES}
    try:
        config: dict[str, Any] = AutoConfig.for_model(kind, **known).to_dict()
    except FAULTS as error:
        raise UserError(f"{path}: config.json is no configuration of a decoder layer: {' '.join(str(error).split())[:200]}") from None
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (config.get("rope_parameters") or {}).items() if value is not None}


def sliding_window(stated: Mapping[str, Any], positions: int, path: str) -> int | None:
    """Return the window that all layers attend in; None if it holds all positions of the backbone. Raises UserError."""
    kinds = set(stated.get("layer_types") or [])
    window = stated.get("sliding_window")
    used = "sliding_attention" in kinds if kinds else bool(stated.get("use_sliding_window"))
    if not used or not isinstance(window, int):
        return None
    if 0 < positions <= window:
        return None
    if "full_attention" in kinds:
        raise UserError(f"{path}: some layers attend to {window} positions and some to all; heads here have one window for all layers")
    return window


def layer_ids_disagree(top: list[int] | None, named: list[int] | None, key: str) -> list[str]:
    """Return a remark if layer ids in both countings contradict each other."""
    if not top or not named or sorted(top) == sorted(tap + 1 for tap in named):
        return []
    return [
        f"layer ids disagree: {IDS} {top} counts layers passed, {key} {named} names layers from 0, so it should be "
        f"{[tap - 1 for tap in top]}; vLLM reads the former, SGLang the latter"
    ]
