"""A tiny random model of every class of transformers' causal and image-text mappings, from the default configuration of its class.

`shrink` does most; here stand nested configurations, the towers of what reads images or sound, and fields that a class needs otherwise.
"""

from typing import Any

import torch
import transformers
from architectures import CHAINS, REFUSED
from families import SILENT, shake
from shrink import DROPPED, LAYERS, SIZES, VOCAB, WIDTH, shrink
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as IMAGE_TEXT

from headstart.heads.backbone.model_config import auto_model

Fields = dict[str, Any]
KINDS = list(dict.fromkeys([*CAUSAL, *IMAGE_TEXT]))
"""The model types of both mappings, as this release of transformers has them."""
TEXT = ("text_config", "llm_config", "language_config", "decoder", "decoder_config")
"""Nested configurations of what writes text; the others are of towers."""


def sizes(**names: int) -> dict[str, int]:
    """Field -> size; a name of several fields has them joined by two underscores."""
    return {name: size for joined, size in names.items() for name in joined.split("__")}


TOWER = sizes(
    num_layers__n_layers__depth__encoder_layers__decoder_layers__num_encoder_layers__num_decoder_layers__num_blocks__num_hidden_layers=1,
    dim__embed_dim__out_hidden_size__projection_dim__text_hidden_size__embedding_size__output_size__output_dim__d_model__hidden_size=WIDTH,
    num_heads__n_heads__encoder_attention_heads__decoder_attention_heads__num_attention_heads__attention_heads=4,
    ffn_dim__d_ff__dff__encoder_ffn_dim__decoder_ffn_dim__dim_ff__mlp_dim__intermediate_size=48,
    image_size=16, patch_size=8, vocab_size=VOCAB,
)  # fmt: skip
DECODER = sizes(
    decoder_layers__num_decoder_layers__num_layers__encoder_layers__num_encoder_layers__layers=LAYERS,
    decoder_attention_heads__encoder_attention_heads__num_decoder_attention_heads__num_encoder_attention_heads__attention_heads=4,
    decoder_ffn_dim__encoder_ffn_dim__ffn_dim__dim_ff__dff=48,
    linear_head_dim=8, linear_num_heads=4, index_n_heads=16, index_head_dim=8, index_topk=8, embedding_dim=WIDTH,
    moe_topk__num_experts_per_token__num_expert_group=2, hidden_size_per_layer_input=8,
)  # fmt: skip
"""Of what writes text, beside those of `shrink`."""
UNSET = {"head_dim": 8, "num_key_value_heads": 4}
"""Where a default configuration says None and its class does not take that."""
KNOWN = {getattr(transformers, f"{name}Config").model_type: changes for name, changes in (CHAINS | REFUSED).values()}
SECTIONS: Fields = {"rope_parameters": {"mrope_section": [2, 1, 1]}}
SECTIONED = ("cosmos3_edge", "glm46v", "glm4v", "glm_ocr", "glmga", "hunyuan_vl", "qwen2_5_vl", "qwen2_vl")
COMPASS: Fields = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2}
CHANGES: dict[str, Fields] = KNOWN | {
    "aria": {"projector_patch_to_query_dict": {1225: 4}},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon": {"vocabulary_map": {"<image>": VOCAB - 1}},
    "cohere_compass": {"text_config": COMPASS},
    "cohere_compass_text": COMPASS,
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", *["sparse"] * 5], "num_experts_per_tok": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": {"head_dim": 12}, "vision_config": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH}},
    "dots3_note_text": {"head_dim": 12},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [16, 16], "rope_parameters": {"mrope_section": [1, 1, 2]}}},
    "gemma3n_text": {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0]},
    "glm5_next": {"text_config": {"index_kpool": 4}},
    "glm4v_moe": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 0]}}},
    "hrm_text": {"num_hidden_layers": 16, "num_layers_per_stack": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"] * 2},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 0]}, "vision_config": {"image_size": [16, 16]}},
    "paddleocr_vl": {"text_config": {"rope_parameters": {"mrope_section": [4, 2, 2]}}},
    "qwen2_5_omni_thinker": {"vision_start_token_id": VOCAB - 1, "text_config": SECTIONS},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCAB - 1},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"axial_pos_embds": False, "attention_head_size": 8, "num_attention_heads": 4, "hidden_size": 32},
    "step3p7": {"text_config": {"sliding_window": 5}},
    "xlnet": {"d_head": 8, "d_inner": 48},
    "zamba": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}
CHANGES |= dict.fromkeys(SECTIONED, {"text_config": SECTIONS})
"""Model type -> fields that its class needs otherwise, most of them since the default configuration leaves them out."""


def tiny_model(kind: str) -> PreTrainedModel:
    """A model of the type ``kind`` with random weights that make its output varied, fp32, without special tokens."""
    return built(merged(small(CONFIG_MAPPING[kind]().to_dict()), CHANGES.get(kind, {})))


def built(fields: Fields, kind: Any = None) -> PreTrainedModel:
    """Such a model of a configuration with these fields; ``kind``: its class, or the class that chooses it."""
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)  # some parameters keep what the library draws for them
    model = (kind or auto_model(config)).from_config(config).eval()
    torch.manual_seed(0)
    shake(model, 2.2)
    model.generation_config = GenerationConfig(**SILENT)
    return model


def small(fields: Fields, tower: bool = False) -> Fields:
    """The fields of a tiny model; nested configurations too, those of towers with one layer."""
    nested = {key: value for key, value in fields.items() if is_configuration(key, value)}
    own = {key: value for key, value in fields.items() if key not in nested and key not in DROPPED}
    if tower:
        own = small_tower(own)
    elif not any(key in TEXT for key in nested):
        own = small_text(own)
    for key in own:
        if key.endswith(("_token_id", "_token_index")):
            own[key] = 0 if key.startswith(("pad", "bos")) else None if key.startswith("eos") else VOCAB  # no text has it
    return own | {key: small(value, tower or key not in TEXT) for key, value in nested.items()}


def small_text(fields: Fields) -> Fields:
    heads = fields.get("num_attention_heads") or fields.get("num_key_value_heads")
    stated = fields | ({"num_attention_heads": heads} if heads else {})
    own = {key: value for key, value in shrink(stated).items() if key in fields}
    own |= {key: size for key, size in DECODER.items() if isinstance(own.get(key), int)}
    own |= {key: size for key, size in UNSET.items() if key in own and own[key] is None}
    if "is_decoder" in own:
        own["is_decoder"] = True
    if own.get("per_layer_config"):
        known = SIZES | {key: own.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
        kept = {layer: value for layer, value in own["per_layer_config"].items() if int(layer) < LAYERS}
        own["per_layer_config"] = {layer: {key: known.get(key, size) for key, size in value.items()} for layer, value in kept.items()}
    return own


def small_tower(fields: Fields) -> Fields:
    """The fields of what reads images or sound: one layer of everything."""
    layers = fields.get("num_hidden_layers") or fields.get("depth") or fields.get("num_layers")
    own = {key: value for key, value in fields.items() if key != "per_layer_config"}
    own |= {key: value[:1] for key, value in own.items() if isinstance(value, list) and len(value) == layers}
    return own | {key: size for key, size in TOWER.items() if type(own.get(key)) is int and own[key]}


def is_configuration(key: str, value: Any) -> bool:
    """Whether a field is a configuration of its own, and not one entry for each layer."""
    return isinstance(value, dict) and (key.endswith("_config") or "model_type" in value) and not all(str(name).isdigit() for name in value)


def merged(fields: Fields, changes: Fields) -> Fields:
    """The fields with the changes, nested ones too."""
    dicts = [key for key, value in changes.items() if isinstance(value, dict) and isinstance(fields.get(key), dict)]
    nested = {key: merged(fields[key], changes[key]) for key in dicts}
    return fields | changes | nested
