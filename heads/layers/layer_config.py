"""Shapes of heads' decoder layers: the backbone's, or as an argument says, and the configuration that serving engines read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from annotated_types import Gt
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig

from headstart.heads.backbone.backbone import Backbone
from headstart.support.config import Size, StrictModel
from headstart.support.errors import UserError


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
    heads = backbone.config.num_attention_heads
    kv_heads, width = config.get("num_key_value_heads") or heads, config.get("head_dim")
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
            intermediate_size=intermediate_size or config.get("intermediate_size") or 4 * backbone.dim,
            num_hidden_layers=1,
            max_position_embeddings=backbone.max_positions or 2048,
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=config.get("eos_token_id"),
            pad_token_id=config.get("pad_token_id"),
            tie_word_embeddings=False,
            **own | given,
        )
    except StrictDataclassError as error:
        raise UserError(f"drafter.layer={given} is no shape of a decoder layer of width {backbone.dim}: {_cause(error)}") from None


def _steady(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters with the same frequencies at every length, of a kind that engines read.

    LongRoPE's and dynamic NTK's change within a text, and engines do not agree on when: vLLM by the longest text that it may serve.
    Gemma-4's proportional ones are the default ones where whole heads are rotated. Ministral-3's scale of queries is no part of them.
    """
    kind = rope["rope_type"]
    if kind in ("longrope", "proportional") or "dynamic" in kind:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {key: value for key, value in rope.items() if key != "llama_4_scaling_beta"}


def _cause(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


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
