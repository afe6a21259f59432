"""The *speculators* format, version 0.9, which the speculators library and vLLM read.

The configuration of the layers stands in ``transformer_layer_config``; there is no ``model_type`` beside it, since vLLM takes a folder with
one for an ordinary model. ``norm_before_residual`` is stated because vLLM's default here is true, and EAGLE-3 heads carry the backbone's
embedding because speculators leaves it uninitialised where it is missing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headstart.inference.serving.formats.format import Format, embedding_unread
from headstart.inference.serving.layout import Layout
from headstart.inference.serving.shapes import block_shapes, eagle3_shapes, has_qk_norm, require_shapes
from headstart.inference.serving.trained import EMBEDDING, Dtype, Trained

VERSION = "0.9.0"
LAYER_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_parameters", "rope_theta", "rope_scaling", "attention_bias",
    "bos_token_id", "eos_token_id", "pad_token_id", "model_type", "tie_word_embeddings", "sliding_window", "layer_types",
)  # fmt: skip
CLASSES = {"eagle3": "Eagle3Speculator", "dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}


class SpeculatorsFormat(Format):
    """EAGLE-3, DFlash and DSpark."""

    methods = ("eagle3", "dflash", "dspark")
    engines = ("vllm",)

    def lay_out(self, trained: Trained, dtype: Dtype) -> Layout:
        config, tensors = trained.cast(dtype)
        common = {
            "architectures": [CLASSES[trained.method]],
            "speculators_model_type": trained.method,
            "speculators_version": VERSION,
            "draft_vocab_size": config["draft_vocab_size"],
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "dtype": config["dtype"],
            "speculators_config": _proposal(trained),
        }
        layers = {key: config[key] for key in LAYER_KEYS if key in config}
        if trained.method == "eagle3":
            tensors = _eagle3_tensors(tensors, trained.embedding().to(tensors["fc.weight"].dtype))
            expected = eagle3_shapes(config, "layers.0.") | {EMBEDDING: [config["vocab_size"], config["hidden_size"]]}
            own = _eagle3_config(config)
            layers["num_aux_hidden_states"] = config["num_aux_hidden_states"]   # vLLM reads it here only
            layers["model_type"] = "qwen3" if has_qk_norm(config) else "llama"
        else:
            expected, own = block_shapes(config), _block_config(config)
            if config["dflash_config"].get("causal"):   # here layers with a window are causal inside a block, others never
                kinds = ["sliding_attention"] * config["num_hidden_layers"]
                window = {"sliding_window": config["max_position_embeddings"], "use_sliding_window": True}
                layers, own = layers | {"layer_types": kinds} | window, own | {"sliding_window_non_causal": False}
        require_shapes(tensors, expected, {}, trained.path)
        return Layout(common | own | {"transformer_layer_config": layers}, tensors, "model.safetensors")

    def unread(self, trained: Trained) -> dict[str, str]:
        return {} if trained.method == "eagle3" else embedding_unread(trained, self.engines)   # EAGLE-3 norms the embedding

    def notes(self, trained: Trained) -> list[str]:
        moved = ["the configuration is that of speculators 0.9"]
        if trained.method == "eagle3":
            moved.append("midlayer. is written as layers.0., and the backbone's embedding is added, which speculators needs")
        return moved


def _proposal(trained: Trained) -> dict[str, Any]:
    """Return which backbone is drafted for, and how many tokens."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": trained.depth, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": trained.served, "architectures": trained.backbone_config.get("architectures") or []}
    return {
        "algorithm": trained.method,
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": verifier,
    }


def _eagle3_config(config: dict[str, Any]) -> dict[str, Any]:
    norms = {key: bool(config.get(key)) for key in ("norm_before_fc", "fc_norm", "norm_output")}
    taps = config["eagle_aux_hidden_state_layer_ids"]
    before = bool(config["norm_before_residual"])
    return norms | {"norm_before_residual": before, "embed_requires_grad": False, "eagle_aux_hidden_state_layer_ids": taps}


def _eagle3_tensors(tensors: dict[str, Tensor], embedding_VD: Tensor) -> dict[str, Tensor]:
    """Rename the first layer, drop the copy of a further layer's norm, which SGLang alone reads, and add the embedding."""
    first = {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.") or not name.endswith(".hidden_norm.weight")}
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in first.items()} | {EMBEDDING: embedding_VD}


def _block_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a block head; its layers are counted as in EAGLE-3 here."""
    correction = {key: config[key] for key in ("markov_rank", "markov_head_type", "enable_confidence_head") if key in config}
    return correction | {
        "aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        "mask_token_id": config["dflash_config"]["mask_token_id"],
        "block_size": config["block_size"],
        "sample_from_anchor": "markov_rank" in config,
        "sliding_window_non_causal": True,
        **({"confidence_head_with_markov": False} if "markov_rank" in config else {}),
    }
