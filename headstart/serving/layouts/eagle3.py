"""EAGLE-3 as SafeAILab, SpecForge and the engines have it: ``fc``, ``midlayer`` or ``layers.0``, ``norm``, ``lm_head``, ``d2t``.

vLLM, SGLang and TensorRT-LLM load the checkpoint as it is, SafeAILab's own code if ``norm_output`` is false. The number j of a top-level
``eagle_aux_hidden_state_layer_ids`` is the residual stream after j layers (vLLM), in ``eagle_config`` the output of layer j (SGLang).
What a file leaves open is read every way that fits: the counting of layer ids, whether ``norm_output`` is an engine's or SpecForge's, and
for a later layer which of two norms is its input norm.

EAGLE-1 and EAGLE-2 are likewise as SafeAILab, vLLM and SGLang have them: ``fc`` over embedding and hidden state, and one layer without an
input norm. The checkpoint as it is has a zero ``fc.bias`` for SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.eagle import BIAS
from headstart.heads.eagle3 import ITS_COPY, SECOND_NORM
from headstart.serving.layouts.checkpoint import Checkpoint
from headstart.serving.layouts.files import PROVENANCE, DamagedError, Files
from headstart.serving.layouts.layout import Counting, Heads, ServedLayout, unscaled_embedding, without_copies
from headstart.serving.layouts.parts import IDS, layer_arguments, layer_ids_disagree, sliding_window, with_vocabulary
from headstart.support.errors import UserError

NORMS = ("norm_before_fc", "fc_norm", "norm_output")
Taps = list[tuple[tuple[int, ...], str]]
"""Possible taps, each with the counting that gives them."""


class Eagle3(ServedLayout):
    """Architecture ``LlamaForCausalLMEagle3``, layers counted in both ways in use. Read as ``layers.0.``, whatever the file calls it."""

    name, title, methods, engines = "eagle3", "EAGLE-3", ("eagle3",), ("vllm", "sglang", "trtllm")
    order = 6

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
        return "fc.weight" in files.shapes and any(numbered(name).endswith("layers.0.hidden_norm.weight") for name in files.shapes)

    def states(self, config: Mapping[str, Any]) -> bool:
        return "Eagle3" in " ".join(config.get("architectures") or [])

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> list[Heads]:
        found = self.of(files, files.config, backbone, tap_choices(files.config, backbone.num_layers, counting, files.path))
        stated = counting == "stated" or (files.folder / PROVENANCE).is_file()
        return found if stated else [either for one in found for either in _either_state(one)]

    def of(self, files: Files, config: Mapping[str, Any], backbone: Backbone, taps: Taps) -> list[Heads]:
        """Return the heads for each of ``taps`` and for each norm that may be a later layer's. ``config`` is flat."""
        path, nested = files.path, config.get("eagle_config") or {}
        _require_computed(files, config, nested, backbone)
        named = {numbered(name): tensor for name, tensor in files.read().items()}
        later, of_later, remarks = _later_norms(named)
        tensors, notes = without_copies({_ours(name): x for name, x in named.items()}, backbone, path, head=False)
        if "lm_head.weight" not in tensors:
            tensors["lm_head.weight"] = backbone.unembed.weight.detach().cpu()
            notes.append("lm_head is missing and was copied from the backbone")
        tensors, size, of_vocabulary, wrong = with_vocabulary(tensors, ["lm_head.weight"], backbone.vocab, path)
        remarks = [*layer_ids_disagree(config.get(IDS), nested.get(IDS), "eagle_config's"), *remarks, *wrong]
        count = config.get("num_aux_hidden_states") or len(taps[0][0])
        if count != len(taps[0][0]):
            remarks.append(f"num_aux_hidden_states is {count} in config.json, and {len(taps[0][0])} layers are read")
        arguments = {
            **layer_arguments(config, backbone, path),
            **{key: bool(config.get(key) or nested.get(key)) for key in NORMS},
            "norm_before_residual": bool(config.get("norm_before_residual")),
            "qk_norm": has_qk_norm(config) or any(name.endswith("self_attn.q_norm.weight") for name in tensors),
            "layers": 1 + len({name.split(".")[1] for name in tensors if name.startswith("layers.")}),
            "sliding_window": sliding_window(config, backbone.max_positions or 0, path),
            "draft_vocab_size": size,
        }
        names, said = {_ours(numbered(name)): name for name in files.shapes}, (*notes, *of_later, *of_vocabulary)
        plain = Heads("eagle3", arguments, tensors, names, said, tuple(remarks))
        return [
            replace(plain, arguments={**arguments, "taps": chosen}, tensors=_with(tensors, norms), choice=joined(of_taps, of_norms))
            for (chosen, of_taps), (norms, of_norms) in product(taps, later)
        ]


def _with(tensors: Mapping[str, Tensor], norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {**tensors, **norms}
    return found | ({ITS_COPY: found[SECOND_NORM]} if SECOND_NORM in found else {})


def _require_computed(files: Files, config: Mapping[str, Any], nested: Mapping[str, Any], backbone: Backbone) -> None:
    """Raise UserError for what eagle3 heads here do not compute."""
    width, scale = config.get("hidden_size", backbone.dim), config.get("logit_scale")
    if "mask_hidden" in files.shapes or config.get("parallel_drafting") or config.get("ptd_token_id") is not None:
        raise UserError(f"{files.path} drafts all tokens in parallel (P-EAGLE), which eagle3 heads here do not")
    if not nested.get("use_aux_hidden_state", True):
        raise UserError(f"{files.path} reads the final hidden state alone (use_aux_hidden_state false), which eagle3 heads here do not")
    if width != backbone.dim:
        raise UserError(f"{files.path} has heads of width {width}; heads here have the backbone's width, {backbone.dim}")
    if scale not in (None, 1.0):
        raise UserError(f"{files.path} scales logits by {scale}, which eagle3 heads here do not")


def _either_state(heads: Heads) -> list[Heads]:
    """Return both heads whose ``norm_output`` is true: to engines the normed state is fed back, to SpecForge it never is."""
    if not heads.arguments["norm_output"]:
        return [heads]
    ways = {True: "norm_output feeds back the normed state", False: "norm_output, as of SpecForge, is of the output layer's input alone"}
    return [replace(heads, arguments={**heads.arguments, "norm_output": on}, choice=joined(heads.choice, way)) for on, way in ways.items()]


def joined(*choices: str) -> str:
    return "; ".join(part for part in choices if part)


def has_qk_norm(config: Mapping[str, Any]) -> bool:
    """Return whether an EAGLE-3 head norms queries and keys, which its architecture says."""
    return "Eagle3Qwen3ForCausalLM" in (config.get("architectures") or [])


def numbered(name: str) -> str:
    """Return a tensor's name with ``layers.0.`` for the first layer, which some layouts call ``midlayer.``."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _ours(name: str) -> str:
    """Return the name of a tensor in Headstart's EAGLE-3 heads."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _later_norms(tensors: dict[str, Tensor]) -> tuple[list[tuple[dict[str, Tensor], str]], list[str], list[str]]:
    """Give later layers' input norms vLLM's name, where SGLang has another.

    Returns what may be read in place of these norms, if they differ, notes, and remarks.
    """
    later = [name for name in tensors if name.endswith(".hidden_norm.weight") and not name.startswith("layers.0.")]
    others: dict[str, Tensor] = {}
    notes, remarks = [], []
    for name in sorted(later):
        ours, norm = name.replace("hidden_norm", "input_layernorm"), tensors.pop(name)
        if ours not in tensors:
            tensors[ours] = norm
            notes.append(f"{ours} is missing, which vLLM reads for a later layer; SGLang reads {name}")
        elif not tensors[ours].equal(norm):
            others[ours] = norm
            remarks.append(f"{ours} and {name} differ, but engines read either as the same norm: swapped or damaged norms")
    if not others:
        return [({}, "")], notes, remarks
    first, said = next(iter(others)), "is the second layer's input norm"
    either = [({}, f"{first} {said}"), (others, f"{first.replace('input_layernorm', 'hidden_norm')} {said}")]
    return either, notes, remarks


def tap_choices(config: Mapping[str, Any], layers: int, counting: Counting | None, path: str) -> Taps:
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
        return [(default, "")]
    order: list[Counting] = ["hs", "layer"] if top is not None else ["layer", "hs"]
    agree = top is not None and nested is not None and top == tuple(i + 1 for i in nested)
    if counting == "stated" or (counting is None and agree):
        order = order[:1]
    elif counting is not None:
        order = [counting]
    choices = [(tuple(sorted({i + (one == "layer") for i in ids})), one) for one in order]
    named = [(taps, f"layer ids {list(ids)} counted as {one}: taps {list(taps)}") for taps, one in choices]
    fitting = [(taps, choice) for taps, choice in named if taps[0] >= 0 and taps[-1] <= layers]
    if not fitting:
        fault = f"{path} reads the layers {list(ids)}, and the backbone has {layers}: shifted layer ids, or heads of another backbone"
        raise DamagedError(f"{fault}; give its own, or another --counting")
    return [(taps, "" if agree and counting is None else choice) for taps, choice in fitting]


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


class Eagle(ServedLayout):
    """Two architectures: vLLM takes ``EagleLlamaForCausalLM``, SGLang ``LlamaForCausalLMEagle``."""

    name, title, methods, engines = "eagle", "EAGLE-1/2", ("eagle",), ("vllm", "sglang")
    order = 7

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        biased = BIAS in heads.tensors and bool(heads.tensors[BIAS].any())
        reasons = {"vllm": "it drops the bias of fc and would draft other tokens"} if biased else {}
        return reasons | unscaled_embedding(heads, self.engines)

    def recognises(self, files: Files) -> bool:
        return "fc.weight" in files.shapes and "layers.0.self_attn.q_proj.weight" in files.shapes

    def parse(self, files: Files, backbone: Backbone, counting: Counting | None = None) -> list[Heads]:
        path, config = files.path, files.config
        if "layers.1.self_attn.q_proj.weight" in files.shapes:
            raise UserError(f"{path} has several decoder layers; eagle heads here have one")
        if odd := next((name for name in FURTHER_NORMS if name in files.shapes), None):
            where = f"{odd} {list(files.shapes[odd])} in {path}"
            raise UserError(f"{path} has a norm {where}, which eagle heads here, in vLLM and in SGLang do not have")
        tensors, notes = without_copies(files.read(), backbone, path)
        if BIAS not in tensors and config.get("bias", False):
            raise UserError(f"{path} lacks the tensor {BIAS} [{backbone.dim}], and its config.json says bias: true")
        bias = tensors.setdefault(BIAS, tensors["fc.weight"].new_zeros(len(tensors["fc.weight"])))
        arguments = {**layer_arguments(config, backbone, path), "bias": bool(bias.any())}
        biased = [f"{BIAS} is not zero: SGLang adds it, vLLM drops it"] * arguments["bias"]
        return [Heads("eagle", arguments, tensors, notes=(*notes, *biased))]
