"""Published sizes of released models, the smallest of each family: what configurations/, which holds the recipes' models, lacks.

Values are those of each model's public config.json; a field left out has transformers' default for the class.
"""

from typing import Any

LONG_FACTORS = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898, 2.735880826, 3.059592084,
    3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372,
    10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03,
    32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip
"""Phi-4-mini's rotary factors beyond 4,096 positions, one for each pair of the rotated dimensions."""
LLAMA3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SIZES: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B-Instruct": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True, "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 21,
    },
    "Phi-4-mini-instruct": {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24,
        "num_key_value_heads": 8, "vocab_size": 200064, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 262144,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": LONG_FACTORS},
    },
    "gemma-2-2b-it": {
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
    },
    "pythia-70m": {
        "model_type": "gpt_neox", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8,
        "vocab_size": 50304, "max_position_embeddings": 2048, "rotary_pct": 0.25, "rotary_emb_base": 10000, "tie_word_embeddings": False,
        "use_parallel_residual": True,
    },
    "Falcon3-1B-Instruct": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 18, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 131072, "max_position_embeddings": 8192, "rope_theta": 1000042,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    },
    "granite-3.3-2b-instruct": {
        "model_type": "granite", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 49159, "max_position_embeddings": 131072, "rope_theta": 10000000.0, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
    },
    "OLMo-2-0425-1B-Instruct": {
        "model_type": "olmo2", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 100352, "max_position_embeddings": 4096, "rope_theta": 500000, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
    "Moonlight-16B-A3B-Instruct": {
        "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446,
        "norm_topk_prob": True, "vocab_size": 163840, "max_position_embeddings": 8192, "rope_theta": 50000.0, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    "GLM-4-9B-0414": {
        "model_type": "glm4", "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 151552, "max_position_embeddings": 32768, "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5, "attention_bias": True, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "aya-expanse-8b": {
        "model_type": "cohere", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 256000, "max_position_embeddings": 8192, "rope_theta": 10000, "logit_scale": 0.125,
    },
    "c4ai-command-r7b-12-2024": {
        "model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 256000, "max_position_embeddings": 8192, "rope_theta": 50000,
        "logit_scale": 0.25, "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    "Qwen3.5-0.8B": {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 248320, "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}, "tie_word_embeddings": True,
    },
    "Olmo-Hybrid-7B": {"model_type": "olmo_hybrid"},
    "phi-1_5": {
        "model_type": "phi", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
        "vocab_size": 51200, "max_position_embeddings": 2048, "partial_rotary_factor": 0.5, "tie_word_embeddings": False,
    },
    "starcoder2-3b": {
        "model_type": "starcoder2", "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30, "num_attention_heads": 24,
        "num_key_value_heads": 2, "vocab_size": 49152, "max_position_embeddings": 16384, "rope_theta": 999999.4420358813,
        "sliding_window": 4096, "use_bias": True, "tie_word_embeddings": True,
    },
    "EXAONE-4.0-1.2B": {
        "model_type": "exaone4", "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 30, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 102400, "max_position_embeddings": 65536, "rope_theta": 1000000.0,
        "rope_scaling": LLAMA3, "sliding_window": None, "sliding_window_pattern": None, "tie_word_embeddings": True,
        "layer_types": ["full_attention"] * 30,
    },
    "ERNIE-4.5-0.3B-PT": {
        "model_type": "ernie4_5", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 103424, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "granite-3.0-1b-a400m-instruct": {
        "model_type": "granitemoe", "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 8, "vocab_size": 49155, "max_position_embeddings": 4096,
        "rope_theta": 10000.0, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 6.0,
        "residual_multiplier": 0.22, "tie_word_embeddings": True,
    },
    "opt-125m": {
        "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272,
        "max_position_embeddings": 2048, "word_embed_proj_dim": 768, "dropout": 0.1,
    },
    "falcon-7b": {
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024,
        "alibi": False, "bias": False, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
    },
}  # fmt: skip
FAMILIES: dict[str, tuple[str, ...]] = {
    "llama-3.2-1b-instruct": ("llama-3.1-8b-instruct", "llama-3.2-1b-instruct", "llama-3.3-70b-instruct"),
    "smollm2-135m-instruct": ("smollm2-135m-instruct", "smollm2-1.7b-instruct"),
    "Falcon3-1B-Instruct": ("falcon3-7b-instruct",),
    "qwen3-0.6b": ("qwen3-8b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-32b"),
    "qwen3-30b-a3b": ("qwen3-235b-a22b-instruct-2507",),
    "Qwen2.5-0.5B-Instruct": ("qwen2.5-7b-instruct",),
    "gemma-3-4b-it": ("gemma-3-4b-it", "gemma-3-12b-it"),
    "gemma-2-2b-it": ("gemma-2-9b-it",),
    "mistral-7b-instruct-v0.3": ("mistral-7b-instruct-v0.3", "mistral-small-24b-instruct-2501", "mistral-small-3.2-24b-instruct-2506"),
    "Phi-4-mini-instruct": ("phi-4",),
    "pythia-70m": ("pythia-1b",),
    "granite-3.3-2b-instruct": ("granite-3.3-8b-instruct", "granite-4.1-3b"),
    "OLMo-2-0425-1B-Instruct": ("olmo-2-1124-7b-instruct",),
    "Moonlight-16B-A3B-Instruct": ("deepseek-v3.1", "kimi-k2.5"),
    "gemma-4-e4b-it": ("gemma-4-31b-it", "gemma-4-e4b-it"),
    "ministral-3-3b-instruct-2512": ("ministral-3-3b-instruct-2512", "ministral-3-8b-instruct-2512"),
    "Qwen3.5-0.8B": ("qwen3.5-4b", "qwen3.5-9b", "qwen3.6-27b"),
    "GLM-4-9B-0414": ("GLM-4 (0414)",),
    "aya-expanse-8b": ("Command-R",),
    "c4ai-command-r7b-12-2024": ("Command-R7B",),
    "Olmo-Hybrid-7B": ("OLMo-Hybrid",),
    "phi-1_5": ("Phi-2",),
    "starcoder2-3b": ("StarCoder2",),
    "EXAONE-4.0-1.2B": ("EXAONE-4",),
    "ERNIE-4.5-0.3B-PT": ("ERNIE-4.5",),
    "granite-3.0-1b-a400m-instruct": ("Granite-3 MoE",),
    "opt-125m": ("OPT",),
    "falcon-7b": ("Falcon-7B",),
}
ALONE = (
    "llama-2-7b-chat-hf", "qwen3-next-80b-a3b-instruct", "gemma-3-1b-it", "gpt-oss-20b", "mixtral-8x7b-instruct-v0.1", "gpt2",
    "smollm3-3b", "gemma-4-12b-it", "gemma-4-26b-a4b-it", "glm-4.5-air", "glm-4.7-flash", "minimax-m2", "olmo-3-7b-instruct",
    "qwen3-vl-8b-instruct", "qwen3.6-35b-a3b",
)  # fmt: skip
"""Models that are the smallest of their family themselves, of which the table has no other."""
SMALLEST = {row: model for model, rows in FAMILIES.items() for row in rows} | {model: model for model in ALONE}
"""Row of docs/families.md, by its first model -> the smallest published model of its family."""
BF16 = (
    "smollm2-135m-instruct", "Qwen2.5-0.5B-Instruct", "gpt2", "Qwen3.5-0.8B", "granite-3.3-2b-instruct", "granite-3.0-1b-a400m-instruct",
    "pythia-70m", "opt-125m", "ERNIE-4.5-0.3B-PT", "qwen3-0.6b", "Falcon3-1B-Instruct", "OLMo-2-0425-1B-Instruct", "phi-1_5",
    "llama-3.2-1b-instruct", "gemma-3-1b-it", "EXAONE-4.0-1.2B", "qwen3-30b-a3b", "smollm3-3b",
    "qwen3-next-80b-a3b-instruct", "gemma-2-2b-it", "gemma-3-4b-it", "starcoder2-3b",
    "Phi-4-mini-instruct", "minimax-m2", "gpt-oss-20b", "Moonlight-16B-A3B-Instruct", "olmo-3-7b-instruct", "llama-2-7b-chat-hf",
    "mistral-7b-instruct-v0.3", "mixtral-8x7b-instruct-v0.1", "falcon-7b", "glm-4.5-air", "GLM-4-9B-0414", "Olmo-Hybrid-7B",
    "c4ai-command-r7b-12-2024", "aya-expanse-8b",
)  # fmt: skip
FP32 = ("smollm2-135m-instruct",)
PASSED = {"fp32": FP32, "bf16": BF16}
"""Precision -> models with whose sizes every step of tests/helpers/released_run.py has passed: what docs/families.md says."""
