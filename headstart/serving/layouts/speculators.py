"""The format of vLLM's *speculators*, version 0.9: ``transformer_layer_config`` and ``speculators_config``; layers counted as states.

There is no ``model_type`` beside the configuration of the layers, since vLLM takes a folder with one for an ordinary model.
``norm_before_residual`` is stated because vLLM's default here is true and speculators' false: a file without it is read both ways. EAGLE-3
heads carry the backbone's embedding, which speculators leaves uninitialised where it is missing; P-EAGLE heads that or their own.
"""

from pathlib import Path
from typing import Any

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import load_config
from headstart.heads.backbone.weight_files import LAYOUTS
from headstart.serving.layouts.block import CONFIDENCE, SECOND, Block, odd_parts
from headstart.serving.layouts.eagle3 import Eagle3, Peagle, has_qk_norm, tap_choices
from headstart.serving.layouts.files import Files, write_folder
from headstart.serving.layouts.layout import Checkpoint, Choice, Counting, Heads, Layout, unscaled_embedding
from headstart.serving.layouts.parts import IDS
from headstart.support.errors import UserError

VERSION = "0.9.0"
LAYER_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_parameters", "rope_theta", "rope_scaling", "attention_bias",
    "bos_token_id", "eos_token_id", "pad_token_id", "model_type", "tie_word_embeddings", "sliding_window", "layer_types",
    "use_sliding_window",
)  # fmt: skip
CLASSES = {
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "dflash": "DFlashSpeculator",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkSpeculator",
}
PAIRS = ("eagle3", "peagle")
ADDED = ", and the backbone's embedding is added, which speculators needs"
KIND, RESIDUAL = "speculators_model_type", "norm_before_residual"
MTP_NAMES = {"input_proj": "eh_proj", "hidden_layernorm": "hnorm", "token_layernorm": "enorm", "final_layernorm": "norm"}
"""Modules of ``mtp_layers.0.``; others are of the decoder layer."""


class Speculators(Layout):
    """EAGLE-3, P-EAGLE, DFlash, DFlash2 and DSpark; MTP modules are read too."""

    name, title, methods, engines = "speculators", "speculators", ("eagle3", "peagle", "dflash", "dflash2", "dspark"), ("vllm",)

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        config, tensors, notes = heads.config, heads.tensors, ["the configuration is that of speculators 0.9"]
        common = {
            "architectures": [CLASSES[heads.method]],
            KIND: heads.method,
            "speculators_version": VERSION,
            "draft_vocab_size": config["draft_vocab_size"],
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "dtype": config["dtype"],
            "speculators_config": _proposal(heads),
        }
        layers = {key: config[key] for key in LAYER_KEYS if key in config}
        if heads.method in PAIRS:  # a later layer's hidden_norm is a copy that SGLang alone reads
            kept = {name: x for name, x in tensors.items() if not (name.startswith("layers.") and name.endswith(".hidden_norm.weight"))}
            tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in kept.items()}
            trained = "embed_tokens.weight" in tensors
            tensors.setdefault("embed_tokens.weight", heads.ends.embed.weight.detach().to(tensors["fc.weight"].dtype))
            own = {key: bool(config.get(key)) for key in ("norm_before_fc", "fc_norm", "norm_output", RESIDUAL)}
            own |= {"embed_requires_grad": trained, IDS: config[IDS]}
            own |= {"mask_token_id": config["mask_token_id"]} if heads.method == "peagle" else {}
            layers["num_aux_hidden_states"] = config["num_aux_hidden_states"]  # vLLM reads it here only
            layers["model_type"] = "qwen3" if has_qk_norm(config) else "llama"
            notes.append(f"midlayer. is written as layers.0.{ADDED * (not trained)}")
        else:
            own = _block_config(config)
            if config["dflash_config"].get("causal"):  # here layers with a window are causal inside a block, others never
                kinds = ["sliding_attention"] * config["num_hidden_layers"]
                window = {"sliding_window": config.get("sliding_window", config["max_position_embeddings"]), "use_sliding_window": True}
                layers, own = layers | {"layer_types": kinds} | window, own | {"sliding_window_non_causal": False}
        write_folder(folder, common | own | {"transformer_layer_config": layers}, tensors)
        return notes

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        if heads.method in PAIRS:  # which norm the embedding
            return {}
        return unscaled_embedding(heads, self.engines) | odd_parts(heads, self.engines)

    def recognises(self, files: Files) -> bool:
        return KIND in files.config or "speculators_config" in files.config

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        config, path = files.config, files.path
        kind = config.get(KIND) or (config.get("speculators_config") or {}).get("algorithm")
        layer = config.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise UserError(f"{path}: config.json is of the speculators format and has no transformer_layer_config; fetch the heads again")
        flat = {**layer, **{key: value for key, value in config.items() if key != "transformer_layer_config" and value is not None}}
        if kind == "mtp":
            heads = _mtp(files, layer, backbone)
        elif kind not in CLASSES:
            raise UserError(f"{path} holds heads of speculators' type {kind!r}; the import reads {', '.join(CLASSES)} and mtp")
        else:
            ids = {IDS: config.get(IDS if kind in PAIRS else "aux_hidden_state_layer_ids")}
            (stated,) = tap_choices(ids, backbone.num_layers, "hs" if counting is None else counting, path)
            taps = [Choice("", stated.arguments)]
            if kind not in PAIRS:
                return _block(files, flat, backbone, taps, anchored=kind == "dspark")
            heads = (Eagle3() if kind == "eagle3" else Peagle()).of(files, flat, backbone, taps)
            if config.get(RESIDUAL) is None and kind == "eagle3":  # P-EAGLE's is false everywhere
                ways = [Choice(f"{RESIDUAL} {str(value).lower()}", {RESIDUAL: value}) for value in (True, False)]
                heads = heads.plus(open=[ways])
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        depth = methods[0].get("speculative_tokens")
        # Of a block that is not the number of its training.
        return heads.plus({"depth": depth}) if isinstance(depth, int) and depth > 0 else heads


def _block(files: Files, config: dict[str, Any], backbone: Backbone, taps: list[Choice], anchored: bool) -> Heads:
    """Return a block head; ``anchored``: whether it drafts from the anchor where ``config`` does not say."""
    kinds, anchored = set(config.get("layer_types") or []), bool(config.get("sample_from_anchor", anchored))
    if len(kinds) > 1:
        raise UserError(f"{files.path} has layers of {' and '.join(sorted(kinds))}, and not all are causal; heads here have one kind")
    causal = "sliding_attention" in kinds and not config.get("sliding_window_non_causal", False)
    heads = Block().of(files, config | {"causal": causal, "sample_from_anchor": anchored}, backbone, taps)
    ignored = "sample_from_anchor is true, which vLLM's reader of this format ignores: it drops the first draft"
    return heads.plus(notes=[ignored] if anchored else [])


def _proposal(heads: Checkpoint) -> dict[str, Any]:
    """Return which backbone is drafted for, and how many tokens."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": heads.depth, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": heads.served, "architectures": load_config(heads.backbone).architectures or []}
    return {"algorithm": heads.method, "default_proposal_method": "greedy", "proposal_methods": [greedy], "verifier": verifier}


def _block_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a block head; its layers are counted as in EAGLE-3 here."""
    nested = config["dflash_config"]
    kept = {key: config[key] for key in ("markov_rank", "markov_head_type", *CONFIDENCE) if key in config}
    return (
        kept
        | {key: nested[key] for key in SECOND if key in nested}
        | {
            "aux_hidden_state_layer_ids": config[IDS],
            "mask_token_id": nested["mask_token_id"],
            "block_size": config["block_size"],
            "sample_from_anchor": "markov_rank" in config,
            "sliding_window_non_causal": True,
        }
    )


def _mtp(files: Files, layer: dict[str, Any], backbone: Backbone) -> Heads:
    kind, start, native = layer.get("model_type"), "mtp_layers.0.", LAYOUTS["qwen3_5"].native
    if kind not in ("qwen3_5_text", "qwen3_next") or files.names(f"{start}mlp.experts"):
        raise UserError(f"{files.path} holds an MTP layer of {kind}; mtp heads here have dense gated layers of Qwen3-Next and Qwen3.5")
    tensors = {}
    for name, tensor in files.read().items():
        module, _, part = name.removeprefix(start).rpartition(".")
        tensors[native(f"mtp.0.{MTP_NAMES.get(module, f'layer.{module}')}.{part}", backbone.num_layers)] = tensor
    return Heads("mtp", {"layout": "qwen3_5"}, tensors)
