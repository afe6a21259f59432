"""Parallel block heads: DFlash (z-lab and the engines), DSpark and Domino, which differ in the correction of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.serving.imports.foreign import Foreign
from headstart.inference.serving.imports.layer_options import layer_arguments
from headstart.inference.serving.imports.pairs import TOP
from headstart.inference.serving.imports.reading import Counting, Reading, Sizes, whole_number, without_copies
from headstart.support.errors import UserError

NAME = "DFlash, DSpark or Domino"
CONFIDENCE = "confidence_head."
ENCODER = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Names of transformers' DFlash class, and z-lab's."""


def recognises(foreign: Foreign) -> bool:
    names = {ENCODER.get(name, name) for name in foreign.shapes}
    return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= names


def sizes(foreign: Foreign) -> Sizes:
    return Sizes(foreign.config.get("hidden_size"), foreign.config.get("vocab_size"), foreign.config.get("num_target_layers"))


def readings(foreign: Foreign, backbone: Backbone, counting: Counting | None) -> list[Reading]:
    config, path = foreign.config, foreign.path
    nested = config.get("dflash_config") or {}
    ids = nested.get("target_layer_ids", config.get("target_layer_ids"))
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise UserError(f"{path}: dflash_config.target_layer_ids in config.json is a list of layer numbers; got {ids!r}")
    top = config.get(TOP)
    flat = {**config, **nested}
    if counting is not None:
        return [read_block(foreign, flat, [i + (counting == "layer") for i in ids], backbone)]
    if top is None or top == [i + 1 for i in ids]:
        return [read_block(foreign, flat, [i + 1 for i in ids], backbone)]
    readings = [(top, f"{TOP} {top}"), ([i + 1 for i in ids], f"target_layer_ids {ids} counted as layer")]
    return [_chosen(read_block(foreign, flat, taps, backbone), f"{choice}: taps {taps}") for taps, choice in readings]


def _chosen(reading: Reading, choice: str) -> Reading:
    return replace(reading, choice=choice)


def read_block(foreign: Foreign, config: Mapping[str, Any], taps: list[int], backbone: Backbone) -> Reading:
    """Read the tensors with these taps; ``config`` is flat. Raises UserError for variants that block heads here do not compute."""
    path = foreign.path
    if sorted(taps) != taps or not all(1 <= tap <= backbone.num_layers for tap in taps):
        raise UserError(f"{path} reads the taps {taps}, and the backbone has {backbone.num_layers} layers; give that of their training")
    correction, notes = _correction(foreign, config), []
    anchored = config.get("sample_from_anchor", correction != "none")
    if bool(anchored) != (correction != "none"):
        usual = "with a correction the first element drafts, without one the second" if correction != "none" else "without a correction"
        raise UserError(f"{path} has sample_from_anchor {str(anchored).lower()}; {usual} in block heads here, so that theirs do not fit")
    elements = whole_number(config, "block_size", path)
    if elements is None or elements < 2:
        raise UserError(f"{path}: block_size in config.json is a whole number of at least 2; got {config.get('block_size')!r}")
    if (foreign.folder / "mask_embedding.pt").is_file():
        raise UserError(f"{path} has a mask embedding of its own (mask_embedding.pt); block heads here use the backbone's")
    names = [name for name in foreign.shapes if not name.startswith((CONFIDENCE, "verifier_"))]
    if len(names) < len(foreign.shapes):
        notes.append("the confidence head is left out: here acceptance is calibrated while decoding")
    if config.get("draft_vocab_size") not in (None, backbone.vocab):
        raise UserError(f"{path} drafts {config['draft_vocab_size']} of the backbone's {backbone.vocab} tokens; block heads here draft all")
    if "sliding_attention" in (config.get("layer_types") or []) or config.get("use_swa"):
        window = config.get("sliding_window") or config.get("swa_window_size")
        notes.append(f"trained with a window of {window} positions, here without: limit(window={window}, sink=0) bounds it")
    tensors, of_copies = without_copies(foreign.read(names), backbone, path)
    tensors = {ENCODER.get(name, name): tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    arguments = {
        **layer_arguments({**config, "model_type": "qwen3"}, backbone, path),
        **_sizes_of(foreign, correction, backbone),
        "depth": elements - (correction == "none"),
        "layers": len({name.split(".")[1] for name in names if name.startswith("layers.")}),
        "taps": tuple(taps),
        "correction": correction,
        "causal": bool(config.get("causal", False)),
        "mask_token": config.get("mask_token_id"),
    }
    origin = {ours: theirs for theirs, ours in ENCODER.items() if theirs in foreign.shapes}
    return Reading("block", arguments, tensors, origin, (*notes, *of_copies))


def _correction(foreign: Foreign, config: Mapping[str, Any]) -> str:
    path = foreign.path
    if foreign.names("markov_head."):
        if (kind := config.get("markov_head_type", "vanilla")) != "vanilla":
            raise UserError(f"{path} has a Markov head of type {kind!r}; block heads here compute the vanilla one")
        return "markov"
    if foreign.names("prefix_gru."):
        odd = {key: config.get(key) for key, value in (("shift_label", True), ("pure_draft_prefix_len", 1)) if config.get(key) != value}
        if odd:
            raise UserError(f"{path} has a Domino head with {odd}; block heads here compute shift_label true and pure_draft_prefix_len 1")
        return "recurrent"
    return "none"


def _sizes_of(foreign: Foreign, correction: str, backbone: Backbone) -> dict[str, Any]:
    """Return the sizes of the correction, from the shapes."""
    if correction == "markov":
        return {"correction_rank": foreign.shapes["markov_head.markov_w1.weight"][-1]}
    if correction == "recurrent":
        state, rank = foreign.shapes["prefix_gru.weight_hh_l0"][-1], foreign.shapes["embed_proj.0.weight"][0]
        return {"correction_rank": rank, "recurrent_size": None if state == max(1, backbone.dim // 4) else state}
    return {}
