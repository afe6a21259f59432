"""Parallel block heads: DFlash (z-lab and the engines), DSpark and Domino, which differ in the correction of the logits.

vLLM, SGLang and TensorRT-LLM load the checkpoint as it is. transformers drafts with a DFlash head as an assistant model, by
``generate(assistant_model=..., speculation_type="dflash")``. ``target_layer_ids`` are layers from 0, whose output is the stream after one
layer more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.serving.layouts.checkpoint import Checkpoint, Dtype
from headstart.inference.serving.layouts.files import Contents, DamagedError, Files
from headstart.inference.serving.layouts.layout import (
    Counting,
    Imported,
    RenamedLayout,
    Sizes,
    unscaled_embedding,
    whole_number,
    without_copies,
)
from headstart.inference.serving.layouts.parts import IDS, layer_arguments, layer_ids_disagree, vocabulary_shapes
from headstart.inference.serving.layouts.reader.base import Reading, Shapes
from headstart.inference.serving.layouts.reader.block import BlockReader
from headstart.inference.serving.layouts.reader.layer import layer_shapes, read_shape
from headstart.support.errors import UserError

UNUSED = ("confidence_head.", "verifier_")
"""Tensors that do not change the drafts of a chain of fixed length."""
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
"""z-lab's names, and those of transformers' class."""
FOREIGN = "muse_glimmer_assistant"
"""The type of that class, whose windows count to both sides."""
READ = {theirs: ours for ours, theirs in RENAMED.items()}
KEPT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "rope_parameters", "max_position_embeddings", "layer_types", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id", "block_size",
    "dtype",
)  # fmt: skip
"""Keys of transformers' class."""


class Block(RenamedLayout):
    """Embedding and output layer are the backbone's; no file of a mask embedding, since the mask is a token of the backbone."""

    name, title = "dflash", "DFlash, DSpark or Domino"
    methods: ClassVar[tuple[str, ...]] = ("dflash", "dspark", "domino")
    engines: ClassVar[tuple[str, ...]] = ("vllm", "sglang", "trtllm")
    order = 5
    copies = frozenset({"embed_tokens.weight", "lm_head.weight"})

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        if heads.config["dflash_config"].get("causal"):
            return dict.fromkeys(self.engines, "it reads causal blocks (drafter.causal) in the layout speculators alone")
        return unscaled_embedding(heads, self.engines)

    def recognises(self, files: Files) -> bool:
        names = {READ.get(name, name) for name in files.shapes}
        return {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= names

    def states(self, config: Mapping[str, Any]) -> bool:
        return "block_size" in config and any(key in config for key in ("dflash_config", "target_layer_ids", "mask_token_id"))

    def read(self, files: Files, on: Sizes, counting: Counting | None = None) -> list[Reading]:
        config, nested = files.config, files.config.get("dflash_config") or {}
        ids, top = nested.get("target_layer_ids", config.get("target_layer_ids")), config.get(IDS)
        if not isinstance(ids, list) or any(type(i) is not int for i in ids):
            raise UserError(f"{files.path}: dflash_config.target_layer_ids in config.json is a list of layer numbers; got {ids!r}")
        flat, outputs = {**config, **nested}, [i + 1 for i in ids]
        if counting in ("hs", "layer"):
            return [self.reading(files, flat, ids if counting == "hs" else outputs, on)]
        if top is None or top == outputs:
            return [self.reading(files, flat, outputs, on)]
        remarks = tuple(layer_ids_disagree(top, ids, "target_layer_ids"))
        readings = [(top, f"{IDS} {top}"), (outputs, f"target_layer_ids {ids} counted as layer")]
        found = [(self.reading(files, flat, taps, on), f"{choice}: taps {taps}") for taps, choice in readings]
        return [replace(reading, choice=choice, remarks=remarks) for reading, choice in found]

    def reading(self, files: Files, config: Mapping[str, Any], taps: list[int], on: Sizes) -> Reading:
        """Read the tensors with these taps; ``config`` is flat."""
        path = files.path
        if sorted(taps) != taps or not all(1 <= tap <= on.layers for tap in taps):
            fault = f"{path} reads the taps {taps}, and the backbone has {on.layers} layers: shifted layer ids, or another backbone"
            raise DamagedError(f"{fault}; give that of their training")
        markov, recurrent = files.names("markov_head.") or config.get("markov_rank"), files.names("prefix_gru.")
        kind = "markov" if markov else "recurrent" if recurrent or config.get("projector_type") == "domino" else "none"
        if kind == "markov" and (form := config.get("markov_head_type", "vanilla")) != "vanilla":
            raise UserError(f"{path} has a Markov head of type {form!r}; block heads here compute the vanilla one")
        fixed = (("shift_label", True), ("pure_draft_prefix_len", 1)) if kind == "recurrent" else ()
        if odd := {key: config.get(key) for key, value in fixed if config.get(key) != value}:
            raise UserError(f"{path} has a Domino head with {odd}; block heads here compute shift_label true and pure_draft_prefix_len 1")
        names = [name for name in files.shapes if not name.startswith(UNUSED)]
        options = {
            "elements": whole_number(config, "block_size", path),
            "mask": config.get("mask_token_id"),
            "anchored": bool(config.get("sample_from_anchor", kind != "none")),
            "correction": kind,
            "causal": _causal(config),
        }
        if config.get("use_swa") and "sliding_attention" not in (config.get("layer_types") or []):  # of every layer, causal in none
            kinds = ["sliding_attention"] * int(config.get("num_hidden_layers") or 1)
            config = {**config, "layer_types": kinds, "sliding_window": config.get("swa_window_size", config.get("sliding_window"))}
        tensors = {READ.get(name, name): tensor for name, tensor in files.read(names).items()}
        return Reading(BlockReader, config, tensors, tuple(taps), options)

    def shaped(self, reading: Reading, on: Sizes) -> Reading:
        config, mask, layer = reading.config, reading.options["mask"], read_shape(reading.config)
        kinds = set(config.get("layer_types") or [])
        if "sliding_attention" in kinds and (len(kinds) > 1 or config.get("model_type") == FOREIGN):
            which = "in some layers" if len(kinds) > 1 else "to both sides, as transformers' class has it,"
            raise UserError(f"a block head with a window {which} is not read by the reference engine: verify with --engine vllm")
        if not isinstance(mask, int) or not 0 <= mask < on.vocab:
            raise UserError(f"config.json states mask_token_id {mask!r}; it is a token of the backbone's vocabulary, below {on.vocab}")
        (V, DV), D = on.vocabularies(config), layer.hidden
        shapes: Shapes = {"fc.weight": (D, len(reading.taps) * (config.get("target_hidden_size") or on.width))}
        shapes |= {"hidden_norm.weight": (D,), "norm.weight": (D,), "embed_tokens.weight": (V, D), "lm_head.weight": (DV, D)}
        shapes |= vocabulary_shapes(DV, V) | _correction_shapes(config, reading.options["correction"], (D, V, DV))
        for i in range(layer.layers):
            own = layer_shapes(layer, D, head_norms=True) | {"input_layernorm.weight": (D,)}
            shapes |= {f"layers.{i}.{name}": size for name, size in own.items()}
        optional = {"embed_tokens.weight", "t2d"} | ({"lm_head.weight"} if DV == V else set())
        windows = tuple(
            None if "sliding_attention" not in kinds or window is None or 0 < on.positions <= window else window for window in layer.windows
        )
        return replace(reading, layer=replace(layer, windows=windows), shapes=shapes, optional=frozenset(optional))

    def imported(self, reading: Reading, files: Files, backbone: Backbone) -> Imported:
        config, path, options = reading.config, files.path, reading.options
        correction, notes = options["correction"], []
        if options["anchored"] != (correction != "none"):
            usual = "with a correction the first element drafts, without one the second" if correction != "none" else "without a correction"
            anchored = str(options["anchored"]).lower()
            raise UserError(f"{path} has sample_from_anchor {anchored}; {usual} in block heads here, so that theirs do not fit")
        if (files.folder / "mask_embedding.pt").is_file():
            raise UserError(f"{path} has a mask embedding of its own (mask_embedding.pt); block heads here use the backbone's")
        if config.get("draft_vocab_size") not in (None, backbone.vocab):
            drafted = config["draft_vocab_size"]
            raise UserError(f"{path} drafts {drafted} of the backbone's {backbone.vocab} tokens; block heads here draft all")
        if len(reading.tensors) < len(files.shapes):
            notes.append("the confidence head is left out: here acceptance is calibrated while decoding")
        window, kinds = config.get("sliding_window"), set(config.get("layer_types") or [])
        own = window if kinds == {"sliding_attention"} and config.get("model_type") != FOREIGN else None
        if "sliding_attention" in kinds and own is None:
            notes.append(f"trained with a window of {window} positions, here without: limit(window={window}, sink=0) bounds it")
        tensors, of_copies = without_copies(reading.tensors, backbone, path)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        arguments = {
            **layer_arguments({**config, "model_type": "qwen3"}, backbone, path),
            **_correction_arguments(reading, backbone.dim),
            "depth": options["elements"] - (correction == "none"),
            "layers": len({name.split(".")[1] for name in tensors if name.startswith("layers.")}),
            "taps": reading.taps,
            "correction": correction,
            "causal": options["causal"],
            "sliding_window": None if own is None or 0 < (backbone.max_positions or 0) <= own else own,
            "mask_token": options["mask"],
        }
        return Imported("block", arguments, tensors, {READ[name]: name for name in files.shapes if name in READ}, (*notes, *of_copies))


class DflashHf(Block):
    """A DFlash head for ``AutoModel``, which has one class of them, named after the first checkpoint it was made for.

    It reads the hidden states that `output_hidden_states` gives, the last of which is after the final norm, so that layer cannot be tapped.
    """

    name, methods, engines = "dflash-hf", ("dflash",), ("transformers",)
    order = 0

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        return {}

    def lay_out(self, heads: Checkpoint, dtype: Dtype) -> Contents:
        config, tensors = heads.cast(dtype)
        layers = heads.card["contract"]["num_hidden_layers"]
        if layers in config[IDS]:
            fault = f"{heads.path} reads layer {layers}, the last, before the final norm; transformers gives it after the norm"
            raise UserError(f"{fault}: train with drafter.taps below {layers}, or export --to dflash")
        if config["dflash_config"].get("causal"):
            raise UserError(f"{heads.path} is causal inside a block (drafter.causal), as transformers never is: export --to speculators")
        if "sliding_window" in config:
            raise UserError(
                f"{heads.path} has a window (drafter.sliding_window), which transformers counts to both sides: export --to dflash"
            )
        stated = {
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": FOREIGN,
            "sliding_window": config["max_position_embeddings"],  # of layers of another type
            **config["dflash_config"],
        }
        kept = {key: config[key] for key in KEPT if key in config}
        return Contents(kept | stated, {RENAMED.get(name, name): tensor for name, tensor in tensors.items()})

    def notes(self, heads: Checkpoint) -> list[str]:
        return [f"tensors are renamed: {', '.join(f'{old} to {new}' for old, new in RENAMED.items())}"]


def _causal(config: Mapping[str, Any]) -> bool:
    """Return whether blocks are causal inside: as stated, or by default where all layers have a window, as vLLM and SGLang read it."""
    stated, kinds = config.get("is_causal", config.get("causal")), set(config.get("layer_types") or [])
    return kinds == {"sliding_attention"} and config.get("model_type") != FOREIGN if stated is None else bool(stated)


def _correction_shapes(config: Mapping[str, Any], kind: str, sizes: tuple[int, int, int]) -> Shapes:
    D, V, DV = sizes
    if kind == "markov":
        rank = whole_number(config, "markov_rank")
        return {"markov_head.markov_w1.weight": (V, rank), "markov_head.markov_w2.weight": (DV, rank)}
    if kind == "recurrent":
        G, rank = whole_number(config, "gru_hidden_dim"), whole_number(config, "emb_dim")
        gru: Shapes = {"prefix_gru.weight_ih_l0": (3 * G, D), "prefix_gru.weight_hh_l0": (3 * G, G)}
        return gru | {"embed_proj.0.weight": (rank, D + G), "embed_proj.2.weight": (V, rank)}
    return {}


def _correction_arguments(reading: Reading, dim: int) -> dict[str, Any]:
    """Return the sizes of the correction, from the shapes."""
    shapes = {name: tensor.shape for name, tensor in reading.tensors.items()}
    if "markov_head.markov_w1.weight" in shapes:
        return {"correction_rank": shapes["markov_head.markov_w1.weight"][-1]}
    if {"prefix_gru.weight_hh_l0", "embed_proj.0.weight"} <= shapes.keys():
        state = shapes["prefix_gru.weight_hh_l0"][-1]
        return {"correction_rank": shapes["embed_proj.0.weight"][0], "recurrent_size": None if state == max(1, dim // 4) else state}
    return {}
