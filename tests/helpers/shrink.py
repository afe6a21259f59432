"""Published configurations made small: the architecture's fields as they are, width, depth and vocabulary reduced.

Ratios that change what is computed are kept: keys and values per query head, heads wider or narrower than the hidden size, the pattern
of layers, the share of rotary dimensions, windows shorter than a text. `tests/helpers/configurations/` holds the configurations.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from families import SILENT, shake
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from headstart.heads.backbone.model_config import auto_model

FOLDER = Path(__file__).parent / "configurations"
VOCAB, LAYERS, WIDTH, HEADS, HEAD = 61, 6, 32, 4, 8
"""Sizes of the small models; a head is ``HEAD`` wide, twice that where the published heads together are wider than the hidden state."""
POSITIONS, WINDOW = 256, 5
SIZES: dict[str, int] = {
    "intermediate_size": 48, "intermediate_size_mlp": 48, "n_inner": 48, "ffn_hidden_size": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "experts_per_token": 2, "moe_k": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 12, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "qk_head_dim": 12, "v_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "mamba_d_state": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_expand": 2, "lru_width": 32,
    "attention_chunk_size": 24, "initial_context_length": 64, "original_max_position_embeddings": 64, "max_window_layers": 2,
    "word_embed_proj_dim": 32, "attention_window_size": 16, "rotary_dim": 4, "block_ff_dim": 48, "block_multiple_of": 16, "conv_dim": 32,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "top_k_experts": 2, "hidden_size_per_layer_input": 8,
}  # fmt: skip
"""Fields of one size in every small model."""
IMAGES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16, "head_dim": 8, "global_head_dim": 8, "mm_embed_dim": 16,
    "num_key_value_heads": 2, "model_patch_size": 24, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "position_embedding_size": 64,
    "mm_hidden_size": 16, "text_hidden_size": 32,
}  # fmt: skip
"""The vision tower of a model that reads images too."""
DROPPED = {"_name_or_path", "quantization_config", "torch_dtype", "dtype", "auto_map", "cache_implementation", "transformers_version"}
NAMES = {"hidden_size": ("n_embd", "d_model"), "num_hidden_layers": ("n_layer",), "num_attention_heads": ("n_head",)}
"""The same field in GPT-2's words."""


def published(model: str) -> dict[str, Any]:
    """The configuration of ``tests/helpers/configurations/<model>.json``."""
    return json.loads((FOLDER / f"{model}.json").read_text())


def shrink(configuration: dict[str, Any], vocab: int = VOCAB, layers: int = LAYERS) -> dict[str, Any]:
    """The configuration of a tiny model of the same architecture, without special tokens."""
    small = {key: value for key, value in copy.deepcopy(configuration).items() if key not in DROPPED}
    for key in [key for key in small if key.endswith("_token_id") or key.endswith("_token_index")]:
        small[key] = 0 if key == "pad_token_id" else None if key in ("bos_token_id", "eos_token_id") else vocab
    if "text_config" in small:
        if "vision_config" in small:
            stated = small["vision_config"]  # Kimi-K2.5's begin with vt_, where transformers reads the plain names
            small["vision_config"] = stated | {key: size for key, size in IMAGES.items() if {key, f"vt_{key}"} & stated.keys()}
        small |= {"audio_config": None} if "audio_config" in small else {}
        return small | {"mm_tokens_per_image": 4, "text_config": shrink(small["text_config"], vocab, layers)}
    hidden, heads = configuration.get("hidden_size", 0), configuration.get("num_attention_heads", 0)
    head = 2 * HEAD if (configuration.get("head_dim") or 0) * heads > hidden else HEAD  # wider where the published ones together are
    small |= {key: size for key, size in SIZES.items() if small.get(key)}
    small |= {"vocab_size_per_layer_input": vocab} if "vocab_size_per_layer_input" in small else {}
    small |= {"vocab_size": vocab, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    for name, size in (("hidden_size", WIDTH), ("num_hidden_layers", layers), ("num_attention_heads", HEADS)):
        small[next((other for other in NAMES[name] if other in small), name)] = size
    small |= {key: head for key in ("head_dim", "query_pre_attn_scalar") if small.get(key)}
    if "qk_rope_head_dim" in small:  # latent attention: the rotary part of a head
        small["head_dim"] = small["qk_rope_head_dim"]
    if small.get("num_key_value_heads"):
        small["num_key_value_heads"] = max(1, round(HEADS * configuration["num_key_value_heads"] / configuration["num_attention_heads"]))
    small |= {key: POSITIONS for key in ("max_position_embeddings", "n_positions", "n_ctx") if small.get(key)}
    small |= {key: WINDOW for key in ("sliding_window", "sliding_window_size") if small.get(key)}
    small |= {key: value[:layers] for key, value in small.items() if isinstance(value, list) and len(value) == depth(configuration)}
    if small.get("num_kv_shared_layers"):  # the second half has the keys and values of the first, where each kind is
        small |= {"num_kv_shared_layers": layers // 2, "layer_types": (["sliding_attention", "full_attention"] * layers)[:layers]}
    for rope in (small.get("rope_scaling"), small.get("rope_parameters")):
        if "original_max_position_embeddings" in (rope or {}):  # a context so short that the scaling matters in a short text
            rope["original_max_position_embeddings"] = 64
    if "attention_multiplier" in small:  # Granite's scale of scores: one over the width of a head
        small["attention_multiplier"] = 1 / head
    return small


def depth(configuration: dict[str, Any]) -> int:
    return configuration.get("num_hidden_layers") or configuration.get("n_layer") or 0


def shrunk(model: str, **changes: Any) -> PreTrainedModel:
    """A small model of ``tests/helpers/configurations/<model>.json`` with random weights."""
    return model_of(shrink(published(model), **changes))


def model_of(configuration: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A model with random weights that make its output varied."""
    config = AutoConfig.for_model(**configuration)
    torch.manual_seed(seed)  # some parameters keep what the library draws for them
    model = auto_model(config).from_config(config).eval()
    torch.manual_seed(seed)
    shake(model, 2.2)
    table = model.get_input_embeddings()
    if table.weight is model.get_output_embeddings().weight:  # with loud tied embeddings each token would follow itself
        with torch.no_grad():
            loudness = table(torch.arange(len(table.weight))).square().mean().sqrt() * configuration.get("embedding_multiplier", 1.0)
            table.weight.mul_(0.3 / loudness)
    model.generation_config = GenerationConfig(**SILENT)
    return model
