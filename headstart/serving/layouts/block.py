"""Parallel block heads: DFlash and DFlash2 (z-lab and the engines), DSpark and Domino, which differ in the correction of the logits.

vLLM, SGLang and TensorRT-LLM load the checkpoint as it is. transformers drafts with a DFlash head as an assistant model, by
``generate(assistant_model=..., speculation_type="dflash")``. ``target_layer_ids`` are layers from 0, whose output is the stream after one
layer more. JetSpec is DFlash with causal blocks: its files say ``causal_head``, NeMo Automodel's and the engines ``causal``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.block import ANCHORED
from headstart.heads.layers.block_parts import GROUP, TAPS
from headstart.serving.layouts.files import DamagedError, Files, write_folder
from headstart.serving.layouts.layout import Checkpoint, Choice, Counting, Heads, Layout, unscaled_embedding, whole_number, without_copies
from headstart.serving.layouts.parts import IDS, layer_arguments, layer_ids_disagree
from headstart.support.errors import UserError

UNUSED = ("verifier_",)
"""Tensors that do not change drafts."""
CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")
SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "final_logit_softcapping")
"""Keys of DFlash2 in ``dflash_config``; those of Speculators are not in it."""
CONFIDENCE_HEAD = "confidence_head.proj."
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


class Block(Layout):
    """Embedding and output layer are the backbone's; no file of a mask embedding, since the mask is a token of the backbone."""

    name, title = "dflash", "DFlash, DFlash2, DSpark or Domino"
    methods: ClassVar[tuple[str, ...]] = ("dflash", "dflash2", "dspark", "domino")
    engines: ClassVar[tuple[str, ...]] = ("vllm", "sglang", "trtllm")

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        found = unscaled_embedding(heads, self.engines) | odd_parts(heads, self.engines)
        if heads.config["dflash_config"].get("causal"):
            deaf = [engine for engine in self.engines if engine != "vllm" or heads.method not in ("dflash", "dflash2")]
            found |= dict.fromkeys(deaf, "it reads causal blocks (drafter.causal) in the layout speculators alone")
        return found

    def recognises(self, files: Files) -> bool:
        stated = "block_size" in files.config and any(key in files.config for key in ("dflash_config", "target_layer_ids", "mask_token_id"))
        names = {READ.get(name, name) for name in files.shapes}
        return stated or {"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= names

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        config, nested = files.config, files.config.get("dflash_config") or {}
        if nested.get("lilicorr_enabled") or files.names("lilicorr."):
            known = "import DFlash, DFlash2, DSpark or Domino heads, or train one of these for that backbone"
            raise UserError(f"{files.path} holds LiLiCorr heads (lilicorr_enabled), which block heads here do not compute: {known}")
        ids, top = nested.get("target_layer_ids", config.get("target_layer_ids")), config.get(IDS)
        if not isinstance(ids, list) or any(type(i) is not int for i in ids):
            raise UserError(f"{files.path}: dflash_config.target_layer_ids in config.json is a list of layer numbers; got {ids!r}")
        taps = [i + (counting != "hs") for i in ids]
        ways = [Choice(f"target_layer_ids {ids} counted as layer: taps {taps}", {"taps": tuple(taps)})]
        remarks = layer_ids_disagree(top, ids, "target_layer_ids") if counting in (None, "stated") else []
        if remarks and top:
            ways.insert(0, Choice(f"{IDS} {top}: taps {top}", {"taps": tuple(top)}))
        return self.of(files, {**config, **nested}, backbone, ways).plus(remarks=remarks)

    def of(self, files: Files, config: Mapping[str, Any], backbone: Backbone, ways: list[Choice]) -> Heads:
        """Return the heads with the taps of each of ``ways``; ``config`` is flat."""
        path, anchored, correction = files.path, config.get("sample_from_anchor"), _correction(files, config)
        for taps in (list(way.arguments["taps"]) for way in ways):
            if sorted(taps) != taps or not all(1 <= tap <= backbone.num_layers for tap in taps):
                fault = f"{path} reads the taps {taps}, and the backbone has {backbone.num_layers} layers"
                raise DamagedError(f"{fault}: shifted layer ids, or another backbone; give that of their training")
        if anchored is not None and bool(anchored) != (correction in ANCHORED):
            usual = "block heads here draft from the anchor in DSpark and Domino, and only there, so that theirs do not fit"
            raise UserError(f"{path} has sample_from_anchor {str(bool(anchored)).lower()}; {usual}")
        if (files.folder / "mask_embedding.pt").is_file():
            raise UserError(f"{path} has a mask embedding of its own (mask_embedding.pt); block heads here use the backbone's")
        if config.get("draft_vocab_size") not in (None, backbone.vocab):
            drafted = config["draft_vocab_size"]
            raise UserError(f"{path} drafts {drafted} of the backbone's {backbone.vocab} tokens; block heads here draft all")
        names = [name for name in files.shapes if not name.startswith(UNUSED)]
        window, notes = _window(config, backbone.max_positions or 0)
        tensors = {READ.get(name, name): tensor for name, tensor in files.read(names).items() if name not in ("d2t", "t2d")}
        tensors, confidence = _confidence(tensors, backbone.dim)
        if not confidence and files.names("confidence_head."):
            notes.append("the confidence head is left out, since heads here have one of another form; drafts do not depend on it")
        foreign = {READ[name]: name for name in files.shapes if name in READ}
        arguments = {
            **layer_arguments({**config, "model_type": "qwen3"}, backbone, path),
            **_correction_arguments(tensors, backbone.dim),
            **_second_arguments(files, config, backbone),
            "depth": whole_number(config, "block_size", path) - (correction not in ANCHORED),
            "layers": len({name.split(".")[1] for name in tensors if name.startswith("layers.")}),
            "correction": correction,
            "confidence": confidence,
            "causal": _causal(config),
            "sliding_window": window,
            "mask_token": config.get("mask_token_id"),
        }
        heads = Heads("block", arguments, tensors, foreign, tuple(notes), open=(ways,))
        return without_copies(heads, backbone, path, "embed_tokens.weight", "lm_head.weight")


class DflashHf(Block):
    """A DFlash head for ``AutoModel``, which has one class of them, named after the first checkpoint it was made for.

    It reads the hidden states that `output_hidden_states` gives, the last of which is after the final norm, so that layer cannot be tapped.
    """

    name, methods, engines = "dflash-hf", ("dflash",), ("transformers",)

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        return {}

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        config, layers = heads.config, heads.card["contract"]["num_hidden_layers"]
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
        write_folder(folder, kept | stated, {RENAMED.get(name, name): tensor for name, tensor in heads.tensors.items()})
        return [f"tensors are renamed: {', '.join(f'{old} to {new}' for old, new in RENAMED.items())}"]


def odd_parts(heads: Checkpoint, engines: tuple[str, ...]) -> dict[str, str]:
    """Return what `Layout.unread` says of heads with one of DFlash2's parts, since engines read both or neither."""
    convolution, selector = (key in heads.config["dflash_config"] for key in ("conv_kernel_size", "selector_rank"))
    both = "it reads drafter.convolution=true with drafter.correction=selector, and either with the other alone (DFlash2)"
    return {} if convolution == selector else dict.fromkeys(engines, f"{both}: train with both or neither")


def _correction(files: Files, config: Mapping[str, Any]) -> str:
    """Return the kind of the correction of logits. Raises UserError for a form that block heads here do not compute."""
    if files.names("markov_head.") or config.get("markov_rank"):
        if (form := config.get("markov_head_type", "vanilla")) != "vanilla":
            raise UserError(f"{files.path} has a Markov head of type {form!r}; block heads here compute the vanilla one")
        return "markov"
    if files.names("candidate_selector.") or config.get("selector_rank"):
        return "selector"
    if not files.names("prefix_gru.") and config.get("projector_type") != "domino":
        return "none"
    fixed = (("shift_label", True), ("pure_draft_prefix_len", 1))
    if odd := {key: config.get(key) for key, value in fixed if config.get(key) != value}:
        raise UserError(f"{files.path} has a Domino head with {odd}; block heads here compute shift_label true and pure_draft_prefix_len 1")
    return "recurrent"


def _causal(config: Mapping[str, Any]) -> bool:
    """Return whether blocks are causal inside: as stated, as JetSpec's are, or by default where all layers have a window, as vLLM and
    SGLang read it.
    """
    keys, kinds = ("is_causal", "causal", "causal_head"), set(config.get("layer_types") or [])
    if (stated := next((config[key] for key in keys if config.get(key) is not None), None)) is not None:
        return bool(stated)
    jetspec = config.get("head_type") == "causal" or "JetSpecDraftModel" in (config.get("architectures") or [])
    return jetspec or kinds == {"sliding_attention"} and config.get("model_type") != FOREIGN


def _window(config: Mapping[str, Any], positions: int) -> tuple[int | None, list[str]]:
    """Return the window of all layers (None: it holds all positions of the backbone, or heads here do not have it), and notes."""
    kinds, window = set(config.get("layer_types") or []), config.get("sliding_window")
    if config.get("use_swa") and "sliding_attention" not in kinds:  # of every layer, causal in none
        kinds, window = {"sliding_attention"}, config.get("swa_window_size", window)
    if "sliding_attention" not in kinds:
        return None, []
    if window is None or kinds != {"sliding_attention"} or config.get("model_type") == FOREIGN:
        return None, [f"trained with a window of {window} positions, here without: limit(window={window}, sink=0) bounds it"]
    return (None if 0 < positions <= window else window), []


def _correction_arguments(tensors: Mapping[str, Tensor], dim: int) -> dict[str, Any]:
    """Return the sizes of the correction, from the shapes."""
    if "markov_head.markov_w1.weight" in tensors:
        return {"correction_rank": tensors["markov_head.markov_w1.weight"].shape[-1]}
    if "candidate_selector.predecessor_codebook" in tensors:
        return {"correction_rank": tensors["candidate_selector.predecessor_codebook"].shape[-1]}
    if {"prefix_gru.weight_hh_l0", "embed_proj.0.weight"} <= tensors.keys():
        state = tensors["prefix_gru.weight_hh_l0"].shape[-1]
        return {"correction_rank": tensors["embed_proj.0.weight"].shape[0], "recurrent_size": None if state == max(1, dim // 4) else state}
    return {}


def _confidence(tensors: Mapping[str, Tensor], dim: int) -> tuple[dict[str, Tensor], bool]:
    """Return the tensors with a confidence head as heads here have it, or without one, and which it is.

    It may read the hidden state alone: here it then has zeros for the parent's row. Without a bias it has zero.
    """
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence_head.")}
    weight_1N, table = tensors.get(f"{CONFIDENCE_HEAD}weight"), tensors.get("markov_head.markov_w1.weight")
    if weight_1N is None or table is None or tuple(weight_1N.shape) not in ((1, dim), (1, dim + table.shape[-1])):
        return others, False
    whole_1N = F.pad(weight_1N, (0, dim + table.shape[-1] - weight_1N.shape[-1]))
    bias_1 = tensors.get(f"{CONFIDENCE_HEAD}bias", whole_1N.new_zeros(1))
    return others | {f"{CONFIDENCE_HEAD}weight": whole_1N, f"{CONFIDENCE_HEAD}bias": bias_1}, True


def _second_arguments(files: Files, config: Mapping[str, Any], backbone: Backbone) -> dict[str, Any]:
    """Return the arguments of DFlash2's parts. Raises UserError for a form that block heads here do not compute."""
    convolution = any("_conv." in name for name in files.shapes) or bool(config.get("conv_kernel_size"))
    wanted: dict[str, Any] = {"conv_kernel_size": TAPS, "conv_group_size": GROUP} if convolution else {}
    if selector := bool(files.names("candidate_selector.") or config.get("selector_rank")):
        cap = getattr(backbone.config, "final_logit_softcapping", None)
        wanted |= {"final_logit_softcapping": cap, "output_multiplier": 1, "input_embedding_scale": 1}
    if odd := {key: config[key] for key, value in wanted.items() if config.get(key) is not None and config[key] != value}:
        ours = {key: wanted[key] for key in odd}
        raise UserError(f"{files.path} has DFlash2 heads with {odd} in config.json; block heads here compute {ours} on this backbone")
    return {"convolution": convolution} | ({"selector_candidates": whole_number(config, "selector_top_k", files.path)} if selector else {})
