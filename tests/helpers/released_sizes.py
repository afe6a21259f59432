"""Published sizes of released models, the smallest of each family: what configurations/, which holds the recipes' models, lacks.

Values are those of each model's public config.json; a field left out has transformers' default for the class.
"""

import json
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
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
