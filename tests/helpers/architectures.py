"""The architectures of docs/families.md: those of the recipes, from published configurations, and others that transformers has."""

import functools
import json
from dataclasses import dataclass
from typing import Any

import transformers
from shrink import FOLDER, model_of, published, shrink
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Architecture:
    """One row of the table: a small configuration and the models that share it."""

    models: tuple[str, ...]
    fields: str
    """The small configuration, as JSON."""

    @property
    def configuration(self) -> dict[str, Any]:
        return json.loads(self.fields)

    @property
    def name(self) -> str:
        return self.models[0]

    @functools.cached_property
    def title(self) -> str:
        return type(self.model()).__name__

    def model(self, vocab: int | None = None) -> PreTrainedModel:
        """A new small model, with another size of the vocabulary if given."""
        fields = self.configuration
        if vocab is not None:
            fields |= {"vocab_size": vocab}
            if "text_config" in fields:
                fields["text_config"] |= {"vocab_size": vocab, "vocab_size_per_layer_input": vocab}
        return model_of(fields)


FROM_RECIPES = (
    "llama-3.1-8b-instruct", "qwen3-8b", "gemma-3-1b-it", "gpt-oss-20b", "mistral-7b-instruct-v0.3", "phi-4", "gpt2",
    "qwen3-next-80b-a3b-instruct", "gemma-2-9b-it", "mixtral-8x7b-instruct-v0.1", "qwen2.5-7b-instruct", "pythia-1b",
)  # fmt: skip
"""The models whose architectures come first, as different as can be: the fast cells of the tests are theirs."""
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GLM-4 (0414)": ("Glm4", {}), "Command-R": ("Cohere", {"logit_scale": 0.3}), "Command-R7B": ("Cohere2", {"logit_scale": 0.3}),
    "OLMo-Hybrid": ("OlmoHybrid", {}), "Phi-2": ("Phi", {}), "StarCoder2": ("Starcoder2", {}), "EXAONE-4": ("Exaone4", {}),
    "ERNIE-4.5": ("Ernie4_5", {}), "Granite-3 MoE": ("GraniteMoe", {}), "OPT": ("OPT", {}), "Falcon-7B": ("Falcon", {}),
}  # fmt: skip
"""Title -> transformers' configuration class and fields that differ from its defaults."""
ALIKE = {"architectures", "initializer_range", "max_window_layers", "rope_theta", "router_aux_loss_coef", "torch_dtype", "use_cache"}
"""Fields in which models of one row of the table may differ."""
CHAINS: dict[str, tuple[str, dict[str, Any]]] = {
    "LFM2": ("Lfm2", {"layer_types": ["conv", "conv", "full_attention"] * 2}),
    "Granite-4": ("GraniteMoeHybrid", {"layer_types": ["mamba", "mamba", "attention"] * 2}),
    "Falcon-H1": ("FalconH1", {"mamba_d_ssm": 64}),
    "Bamba": ("Bamba", {"attn_layer_indices": [2, 5]}),
    "Zamba2": (
        "Zamba2",
        {
            "mamba_headdim": 8, "attention_hidden_size": 64, "attention_head_dim": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba"] * 2, "hybrid_layer_ids": [1, 4],
        },
    ),
    "Nemotron-H": ("NemotronH", {}),
    "Mamba-2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2}),
    "RWKV": ("Rwkv", {"attention_hidden_size": 32}),
    "Llama-4": ("Llama4Text", {}),
    "DeepSeek-V3.2, GLM-5": ("GlmMoeDsa", {}),
    "DeepSeek-V4": ("DeepseekV4", {"head_dim": 16, "qk_rope_head_dim": 2}),
    "BLOOM": ("Bloom", {}),
    "MPT": ("Mpt", {}),
    "GPT-Neo": (
        "GPTNeo",
        {
            "num_layers": 6, "attention_types": [[["global", "local"], 3]], "attention_layers": ["global", "local"] * 3, "window_size": 5,
            "num_heads": 4,
        },
    ),
}  # fmt: skip
"""The same for architectures that verify chains, not trees."""
CHAINED = {"lfm2-1.2b"}
"""Those of the recipes."""
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "MiniMax-01": ("MiniMax", {}), "Jamba": ("Jamba", {}), "Mamba": ("Mamba", {}), "RecurrentGemma": ("RecurrentGemma", {}),
}  # fmt: skip
"""The same for architectures that can verify neither."""


def of_the_recipes() -> list[Architecture]:
    """The models of tests/helpers/configurations, those of equal small configurations together."""
    found: dict[str, list[str]] = {}
    names = sorted(path.stem for path in FOLDER.glob("*.json"))
    for name in [*FROM_RECIPES, *(name for name in names if name not in FROM_RECIPES)]:
        found.setdefault(json.dumps(kind_of(shrink(published(name))), sort_keys=True), []).append(name)
    return [Architecture(tuple(models), json.dumps(shrink(published(models[0])), sort_keys=True)) for models in found.values()]


def kind_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields in which architectures differ."""
    return {key: kind_of(value) if isinstance(value, dict) else value for key, value in fields.items() if key not in ALIKE}


def of_transformers(names: dict[str, tuple[str, dict[str, Any]]]) -> list[Architecture]:
    """Architectures whose default configuration in transformers stands for the models."""
    made = []
    for title, (name, changes) in names.items():
        stated = getattr(transformers, f"{name}Config")().to_dict()
        made.append(Architecture((title,), json.dumps(shrink(stated) | changes, sort_keys=True)))
    return made


@functools.cache
def served() -> list[Architecture]:
    return [one for one in of_the_recipes() if one.name not in CHAINED] + of_transformers(OTHERS)


@functools.cache
def chained() -> list[Architecture]:
    return [one for one in of_the_recipes() if one.name in CHAINED] + of_transformers(CHAINS)


@functools.cache
def refused() -> list[Architecture]:
    return of_transformers(REFUSED)
