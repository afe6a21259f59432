"""The format of vLLM's speculators: ``transformer_layer_config`` and ``speculators_config``; layers counted as states.

Where a file does not say ``norm_before_residual``, vLLM assumes true and speculators false: both are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.serving.imports.block import read_block
from headstart.inference.serving.imports.eagle3 import read_eagle3
from headstart.inference.serving.imports.foreign import Foreign
from headstart.inference.serving.imports.layer_options import sliding_window
from headstart.inference.serving.imports.pairs import tap_choices
from headstart.inference.serving.imports.reading import Counting, Reading, Sizes
from headstart.support.errors import UserError

NAME = "speculators"
KIND, RESIDUAL = "speculators_model_type", "norm_before_residual"
LAYER_IDS = {"eagle3": "eagle_aux_hidden_state_layer_ids", "dflash": "aux_hidden_state_layer_ids", "dspark": "aux_hidden_state_layer_ids"}
MTP_NAMES = {"input_proj": "mtp.fc", "hidden_layernorm": "mtp.pre_fc_norm_hidden", "token_layernorm": "mtp.pre_fc_norm_embedding",
             "final_layernorm": "mtp.norm"}  # fmt: skip
"""Modules of ``mtp_layers.0.`` and the names that Qwen's checkpoints give them."""


def recognises(foreign: Foreign) -> bool:
    return KIND in foreign.config or "speculators_config" in foreign.config


def sizes(foreign: Foreign) -> Sizes:
    layer = foreign.config.get("transformer_layer_config") or {}
    return Sizes(foreign.config.get("target_hidden_size") or layer.get("hidden_size"), layer.get("vocab_size"))


def readings(foreign: Foreign, backbone: Backbone, counting: Counting | None) -> list[Reading]:
    config, path = foreign.config, foreign.path
    kind = config.get(KIND) or (config.get("speculators_config") or {}).get("algorithm")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(f"{path}: config.json is of the speculators format and has no transformer_layer_config; fetch the heads again")
    flat = {**layer, **{key: value for key, value in config.items() if key != "transformer_layer_config"}}
    if kind == "mtp":
        return [_mtp(foreign, layer)]
    if kind not in LAYER_IDS:
        raise UserError(f"{path} holds heads of speculators' type {kind!r}; the import reads {', '.join(LAYER_IDS)} and mtp")
    ids = {"eagle_aux_hidden_state_layer_ids": config.get(LAYER_IDS[kind])}
    taps = tap_choices(ids, backbone.num_layers, counting or "hs", path)
    if kind == "eagle3":
        found = read_eagle3(foreign, flat, backbone, taps)
        depth = _depth(config)
        found = [replace(one, arguments={**one.arguments, **depth}, choice=_without_taps(one.choice, taps[0][1])) for one in found]
        return [both for one in found for both in _residuals(one)] if RESIDUAL not in config else found
    kinds = set(layer.get("layer_types") or [])
    if len(kinds) > 1:
        raise UserError(f"{path} has layers of {' and '.join(sorted(kinds))}, and not all are causal; heads here have one kind")
    causal = "sliding_attention" in kinds and not config.get("sliding_window_non_causal", False)
    unbounded = {"layer_types": None} if sliding_window(flat, backbone, path) is None else {}
    return [read_block(foreign, {**flat, **unbounded, "causal": causal}, list(taps[0][0]), backbone)]


def _depth(config: Any) -> dict[str, int]:
    """Return the number of drafted tokens that the format states, if any."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    stated = methods[0].get("speculative_tokens")
    return {"depth": stated} if isinstance(stated, int) and stated > 0 else {}


def _without_taps(choice: str, taps: str) -> str:
    """Leave out the counting, which the format defines."""
    return choice.removeprefix(taps).removeprefix("; ")


def _residuals(reading: Reading) -> list[Reading]:
    parts = [] if not reading.choice else [reading.choice]
    return [
        replace(reading, arguments={**reading.arguments, RESIDUAL: value}, choice="; ".join([*parts, f"{RESIDUAL} {str(value).lower()}"]))
        for value in (True, False)
    ]


def _mtp(foreign: Foreign, layer: dict[str, Any]) -> Reading:
    kind, start = layer.get("model_type"), "mtp_layers.0."
    if kind not in ("qwen3_5_text", "qwen3_next") or foreign.names(f"{start}mlp.experts"):
        raise UserError(f"{foreign.path} holds an MTP layer of {kind}; mtp heads here have dense gated layers of Qwen3-Next and Qwen3.5")
    tensors, names = {}, {}
    for name, tensor in foreign.read(foreign.shapes).items():
        module, _, part = name.removeprefix(start).rpartition(".")
        mine = f"{MTP_NAMES[module]}.{part}" if module in MTP_NAMES else f"mtp.layers.0.{module}.{part}"
        tensors[mine], names[mine] = tensor, name
    arguments = {"layout": "qwen3_5", "shared": True, **_depth(foreign.config)}
    return Reading("mtp", arguments, tensors, names)
