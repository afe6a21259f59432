"""EAGLE-3 as SafeAILab, SpecForge and the engines have it: ``fc``, ``midlayer`` or ``layers.0``, ``norm``, ``lm_head``, ``d2t``.

vLLM, SGLang and TensorRT-LLM load the checkpoint as it is, SafeAILab's own code if ``norm_output`` is false. The number j of a top-level
``eagle_aux_hidden_state_layer_ids`` is the residual stream after j layers (vLLM), in ``eagle_config`` the output of layer j (SGLang).
What a file leaves open is read every way that fits: the counting of layer ids, whether ``norm_output`` is an engine's or SpecForge's, and
for a later layer which of two norms is its input norm.

P-EAGLE adds ``mask_hidden`` and a mask token, and may have an embedding of its own. Engines look for the token under several names.

EAGLE-1 and EAGLE-2 are likewise as SafeAILab, vLLM and SGLang have them: ``fc`` over embedding and hidden state, and one layer without an
input norm. The checkpoint as it is has a zero ``fc.bias`` for SGLang.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.eagle import BIAS
from headstart.heads.eagle3 import ITS_COPY, SECOND_NORM
from headstart.serving.layouts.files import DamagedError, Files
from headstart.serving.layouts.layout import Checkpoint, Choice, Counting, Heads, Layout, unscaled_embedding, without_copies
from headstart.serving.layouts.parts import IDS, layer_arguments, layer_ids_disagree, sliding_window, with_vocabulary
from headstart.support.errors import UserError

FIRST_NORM = ("layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight")
NORMS = ("norm_before_fc", "fc_norm", "norm_output")
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names of the mask token of parallel drafts: speculators', and those of vLLM."""
STATES = [
    Choice("norm_output feeds back the normed state", {"norm_output": True}),
    Choice("norm_output, as of SpecForge, is of the output layer's input alone", {"norm_output": False}),
]
"""What ``norm_output`` true means: to engines the normed state is fed back, to SpecForge it never is."""


class Eagle3(Layout):
    """Architecture ``LlamaForCausalLMEagle3``, layers counted in both ways in use."""

    name, title, methods = "eagle3", "EAGLE-3", ("eagle3",)
    engines: ClassVar[tuple[str, ...]] = ("vllm", "sglang", "trtllm")

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        reasons = {}
        if heads.config.get("attention_bias"):
            reasons["sglang"] = "it has no biases of queries, keys and values in EAGLE-3"
        if has_qk_norm(heads.config):
            reasons |= dict.fromkeys(("sglang", "trtllm"), "it has no EAGLE-3 module that norms queries and keys (drafter.qk_norm)")
        if heads.config["norm_before_residual"]:
            reasons |= dict.fromkeys(("sglang", "trtllm"), "it ignores norm_before_residual and would draft other tokens")
        return reasons

    def recognises(self, files: Files) -> bool:
        named = "Eagle3" in " ".join(files.config.get("architectures") or [])
        return named or ("fc.weight" in files.shapes and any(name.endswith(FIRST_NORM) for name in files.shapes))

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        heads = self.of(files, files.config, backbone, tap_choices(files.config, backbone.num_layers, counting, files.path))
        return heads.plus(open=[STATES]) if heads.arguments["norm_output"] and counting != "stated" else heads

    def of(self, files: Files, config: Mapping[str, Any], backbone: Backbone, taps: list[Choice]) -> Heads:
        """Return the heads, with ``taps`` and a later layer's norm as they may be. ``config`` is flat."""
        path, nested = files.path, config.get("eagle_config") or {}
        _require_computed(files, config, nested, backbone)
        tensors = {_ours(name): tensor for name, tensor in files.read().items()}
        heads = _with_later_norms(Heads("eagle3", {}, tensors, {_ours(name): name for name in files.shapes}, open=(taps,)))
        heads = self.embedding(heads, backbone, path)
        if "lm_head.weight" not in tensors:
            output = {"lm_head.weight": backbone.unembed.weight.detach().cpu()}
            heads = heads.plus(tensors=output, notes=["lm_head is missing and was copied from the backbone"])
        heads = heads.plus(remarks=layer_ids_disagree(config.get(IDS), nested.get(IDS), "eagle_config's"))
        heads = with_vocabulary(heads, ["lm_head.weight"], backbone.vocab, path)
        layers = len(taps[0].arguments["taps"])
        if (count := config.get("num_aux_hidden_states") or layers) != layers:
            heads = heads.plus(remarks=[f"num_aux_hidden_states is {count} in config.json, and {layers} layers are read"])
        return heads.plus({
            **layer_arguments(config, backbone, path),
            **{key: bool(config.get(key) or nested.get(key)) for key in NORMS},
            "norm_before_residual": bool(config.get("norm_before_residual")),
            "qk_norm": has_qk_norm(config) or any(name.endswith("self_attn.q_norm.weight") for name in tensors),
            "layers": 1 + len({name.split(".")[1] for name in tensors if name.startswith("layers.")}),
            "sliding_window": sliding_window(config, backbone.max_positions or 0, path),
        })  # fmt: skip

    def embedding(self, heads: Heads, backbone: Backbone, path: str) -> Heads:
        """Return the heads without their copy of the backbone's embedding. Raises UserError for another one."""
        return without_copies(heads, backbone, path, "embed_tokens.weight")


def beyond_the_original(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an engine that drafts as the original EAGLE-3 does would draft otherwise, in words, and whether heads have it."""
    return {
        "it drafts from the state before the final norm: train with drafter.norm_output=false": config.get("norm_output"),
        "it reads three layers of the backbone: train with three drafter.taps": len(config[IDS]) != 3,
        "it reads one decoder layer: train with drafter.layers=1": config["num_hidden_layers"] != 1,
        "it does not norm each tap: train with drafter.fc_norm=false": config.get("fc_norm"),
        "it attends to all positions: train with drafter.sliding_window=null": config.get("sliding_window"),
        "it does not norm queries and keys: train with drafter.qk_norm=false": has_qk_norm(config),
        "it has no biases of queries, keys and values: train with drafter.layer.attention_bias=false": config.get("attention_bias"),
    }


class OpenVino(Eagle3):
    """For OpenVINO GenAI, whose converter (optimum-intel) takes the checkpoint as it is and passes over the keys of EAGLE-3.1 and the taps.

    By default the engine reads each of EAGLE-3's default layers one too late; the launch line sets those of the heads.
    """

    name, title, engines = "openvino", "EAGLE-3 for OpenVINO", ("openvino",)
    least_layers = 10

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        config, layers = heads.config, int(heads.card["contract"]["num_hidden_layers"])
        found = beyond_the_original(config) | {
            "it ignores norm_before_residual: train with drafter.norm_before_residual=false": config["norm_before_residual"],
            "it does not norm the taps: train with drafter.norm_before_fc=false": (config.get("eagle_config") or {}).get("norm_before_fc"),
            f"it drafts for backbones of at least {self.least_layers} layers; this one has {layers}": layers < self.least_layers,
            "it reads no embedding as a tap: train with drafter.taps from 1 on": 0 in config[IDS],
        }
        reason = next((reason for reason, holds in found.items() if holds), None)
        return {} if reason is None else {self.name: reason}

    def recognises(self, files: Files) -> bool:
        return False  # it is EAGLE-3's

    def write(self, heads: Checkpoint, folder: Path) -> list[str]:
        super().write(heads, folder)
        return ["OpenVINO: draft chains, since with trees it writes another text than without heads"]


class Peagle(Eagle3):
    """EAGLE-3's architecture with ``parallel_drafting``; of the engines vLLM alone knows it."""

    name, title, methods = "peagle", "P-EAGLE", ("peagle",)
    engines = ("vllm",)

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        return {}

    def recognises(self, files: Files) -> bool:
        parallel = "mask_hidden" in files.shapes or files.config.get("parallel_drafting")
        return bool(parallel) and "transformer_layer_config" not in files.config and super().recognises(files)

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        return self.of(files, files.config, backbone, tap_choices(files.config, backbone.num_layers, counting, files.path))

    def of(self, files: Files, config: Mapping[str, Any], backbone: Backbone, taps: list[Choice]) -> Heads:
        heads, width = super().of(files, config, backbone, taps), len(taps[0].arguments["taps"]) * backbone.dim
        stated = {key: config[key] for key in MASKS if config.get(key) is not None}
        if len({*stated.values()}) != 1:
            found = ", ".join(f"{key} {value}" for key, value in stated.items()) or "none"
            raise UserError(
                f"{files.path} drafts in parallel and names one mask token in config.json, as {' or '.join(MASKS)}; got {found}"
            )
        hidden = heads.tensors.get("mask_hidden")
        if hidden is None or hidden.numel() != width:
            found = "no mask_hidden" if hidden is None else f"mask_hidden {list(hidden.shape)}"
            raise UserError(f"{files.path} drafts in parallel and has {found}; expected is mask_hidden [1, 1, {width}]: fetch it again")
        arguments = {key: value for key, value in heads.arguments.items() if key != "norm_output"}  # no state is fed back
        heads = replace(heads, kind="peagle", arguments=arguments).without([ITS_COPY])
        return heads.plus({"mask_token": next(iter(stated.values()))}, {"mask_hidden": hidden.reshape(1, 1, width)})

    def embedding(self, heads: Heads, backbone: Backbone, path: str) -> Heads:
        """Return the heads without a copy of the backbone's embedding, or with an embedding of their own."""
        found = heads.tensors.get("embed_tokens.weight")
        own = found is not None and not found.equal(backbone.embed.weight.detach().to("cpu", found.dtype))
        return heads.plus({"own_embedding": True}) if own else super().embedding(heads, backbone, path)


def _require_computed(files: Files, config: Mapping[str, Any], nested: Mapping[str, Any], backbone: Backbone) -> None:
    """Raise UserError for what eagle3 heads here do not compute."""
    width, scale = config.get("hidden_size", backbone.dim), config.get("logit_scale")
    if not nested.get("use_aux_hidden_state", True):
        raise UserError(f"{files.path} reads the final hidden state alone (use_aux_hidden_state false), which eagle3 heads here do not")
    if width != backbone.dim:
        raise UserError(f"{files.path} has heads of width {width}; heads here have the backbone's width, {backbone.dim}")
    if scale not in (None, 1.0):
        raise UserError(f"{files.path} scales logits by {scale}, which eagle3 heads here do not")


def has_qk_norm(config: Mapping[str, Any]) -> bool:
    """Return whether an EAGLE-3 head norms queries and keys, which its architecture says."""
    return "Eagle3Qwen3ForCausalLM" in (config.get("architectures") or [])


def _ours(name: str) -> str:
    """Return the name of a tensor in Headstart's EAGLE-3 heads, whose first layer is ``midlayer.``; some layouts call it ``layers.0.``."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _with_later_norms(heads: Heads) -> Heads:
    """Give the second layer's input norm both its names: vLLM reads one, SGLang the other. If the two differ, either may be meant."""
    norm, copy = heads.tensors.get(SECOND_NORM), heads.tensors.get(ITS_COPY)
    if norm is None:
        missing = f"{SECOND_NORM} is missing, which vLLM reads for a later layer; SGLang reads {ITS_COPY}"
        return heads if copy is None else heads.plus(tensors={SECOND_NORM: copy}, notes=[missing])
    heads = heads.plus(tensors={ITS_COPY: norm})
    if copy is None or norm.equal(copy):
        return heads
    remark = f"{SECOND_NORM} and {ITS_COPY} differ, but engines read either as the same norm: swapped or damaged norms"
    found = {SECOND_NORM: norm, ITS_COPY: copy}.items()
    ways = [Choice(f"{name} is the second layer's input norm", {}, {SECOND_NORM: source, ITS_COPY: source}) for name, source in found]
    return heads.plus(remarks=[remark], open=[ways])


def tap_choices(config: Mapping[str, Any], layers: int, counting: Counting | None, path: str) -> list[Choice]:
    """Return the possible taps of an EAGLE-3 configuration, the likeliest first; ``stated``: only as its keys say.

    The key at the top counts states (vLLM), the one in ``eagle_config`` outputs of layers (SGLang); files with one of them exist in both
    countings. Without either the taps are the default, on which all engines agree.
    """
    top = _ids(config.get(IDS), IDS, path)
    nested = _ids((config.get("eagle_config") or {}).get(IDS), f"eagle_config.{IDS}", path)
    ids = top if top is not None else nested
    if ids is None:
        default = (2, layers // 2, layers - 3)
        if len(set(default)) < 3 or min(default) < 0:
            raise UserError(f"{path} names no layers to read ({IDS}), and the default {list(default)} is none for {layers} layers; add it")
        return [Choice("", {"taps": default})]
    agree = top is not None and nested is not None and top == tuple(i + 1 for i in nested)
    order = ["hs", "layer"] if top is not None else ["layer", "hs"]
    if counting == "stated" or (counting is None and agree):
        order = order[:1]
    elif counting is not None:
        order = [counting]
    choices = []
    for way in order:
        taps = tuple(i + (way == "layer") for i in ids)
        if taps[0] >= 0 and taps[-1] <= layers:
            choices.append(Choice(f"layer ids {list(ids)} counted as {way}: taps {list(taps)}" * (not agree), {"taps": taps}))
    if not choices:
        fault = f"{path} reads the layers {list(ids)}, and the backbone has {layers}: shifted layer ids, or heads of another backbone"
        raise DamagedError(f"{fault}; give its own, or another --counting")
    return choices


def _ids(value: Any, key: str, path: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str) or not value or any(type(i) is not int for i in value):
        raise UserError(f"{path}: {key} in config.json is a list of layer numbers; got {value!r}")
    return tuple(sorted(set(value)))


FURTHER_NORMS = (
    "layers.0.input_layernorm.weight", "norm.weight", "embed_layernorm.weight", "hidden_layernorm.weight", "lm_head_layernorm.weight",
)  # fmt: skip
"""Of variants of EAGLE."""


class Eagle(Layout):
    """Two architectures: vLLM takes ``EagleLlamaForCausalLM``, SGLang ``LlamaForCausalLMEagle``."""

    name, title, methods, engines = "eagle", "EAGLE-1/2", ("eagle",), ("vllm", "sglang")

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        biased = BIAS in heads.tensors and bool(heads.tensors[BIAS].any())
        reasons = {"vllm": "it drops the bias of fc and would draft other tokens"} if biased else {}
        return reasons | unscaled_embedding(heads, self.engines)

    def recognises(self, files: Files) -> bool:
        return "fc.weight" in files.shapes and "layers.0.self_attn.q_proj.weight" in files.shapes

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> Heads:
        path, config = files.path, files.config
        if "layers.1.self_attn.q_proj.weight" in files.shapes:
            raise UserError(f"{path} has several decoder layers; eagle heads here have one")
        if odd := next((name for name in FURTHER_NORMS if name in files.shapes), None):
            where = f"{odd} {list(files.shapes[odd])} in {path}"
            raise UserError(f"{path} has a norm {where}, which eagle heads here, in vLLM and in SGLang do not have")
        heads = Heads("eagle", layer_arguments(config, backbone, path), files.read())
        heads = without_copies(heads, backbone, path, "embed_tokens.weight", "lm_head.weight")
        if BIAS not in heads.tensors and config.get("bias", False):
            raise UserError(f"{path} lacks the tensor {BIAS} [{backbone.dim}], and its config.json says bias: true")
        fc = heads.tensors["fc.weight"]
        bias = heads.tensors.get(BIAS, fc.new_zeros(len(fc)))
        notes = [f"{BIAS} is not zero: SGLang adds it, vLLM drops it"] if bool(bias.any()) else []
        return heads.plus({"bias": bool(notes)}, {BIAS: bias}, notes)
