"""EAGLE-3 and 3.1 (2503.01840, 2605.09992) as SafeAILab, vLLM, SGLang and speculators store them.

Names: layer 0 as ``midlayer.`` or ``layers.0.``. Layers read: the number ``j`` of a top-level ``eagle_aux_hidden_state_layer_ids`` is the
residual stream after j layers (vLLM, speculators), in ``eagle_config`` the output of layer j, after j + 1 layers (SGLang).

Shape suffixes: T rows, D width, X taps concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstart.inference.serving.reference.files import DamagedError, Files
from headstart.inference.serving.reference.layer import LayerShape, layer_shapes, linear, norm, read_shape
from headstart.inference.serving.reference.pairs import PairDrafting
from headstart.inference.serving.reference.reading import Reading, load, vocabulary_shapes, whole_number
from headstart.inference.serving.reference.target import Target
from headstart.support.errors import UserError

IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Eagle3Drafting(PairDrafting):
    """A draft with ``reading.options``: the flags of `FLAGS`."""

    method = "eagle3"

    @classmethod
    def recognises(cls, files: Files) -> bool:
        architectures = " ".join(files.config.get("architectures") or [])
        named = "Eagle3" in architectures or files.config.get("speculators_model_type") == "eagle3"
        return named or "midlayer.hidden_norm.weight" in files.names

    @classmethod
    def read(cls, files: Files, target: Target) -> Reading:
        if "mask_hidden" in files.names:
            raise UserError(f"{files.folder} holds P-EAGLE (parallel EAGLE-3), which the reference engine does not read; use --engine vllm")
        config = _flat(files.config)
        remarks: list[str] = []
        notes: list[str] = []
        shape = read_shape(config)
        taps = _taps(config, target.num_layers, remarks)
        options = {flag: bool(config.get(flag)) for flag in FLAGS}
        options["qk_norm"] = any(name.endswith("self_attn.q_norm.weight") for name in files.names)
        options["norm_before_fc"] |= bool((config.get("eagle_config") or {}).get("norm_before_fc"))
        if options["norm_before_residual"] and "speculators_model_type" not in files.config:
            notes.append("norm_before_residual is true, which SGLang and TensorRT-LLM ignore")
        vocab = config.get("vocab_size") or target.vocab
        draft_vocab = whole_number(config, "draft_vocab_size", vocab) if config.get("draft_vocab_size") else vocab
        wide = config.get("target_hidden_size") or target.dim
        shapes = _shapes(shape, len(taps) * wide, draft_vocab, vocab, options)
        optional = {"lm_head.weight", "embed_tokens.weight", "t2d"} if draft_vocab == vocab else {"embed_tokens.weight", "t2d"}
        names = _names(files, remarks, notes)
        return Reading(
            cls.method, load(files, names), shapes, taps, shape, options, frozenset(optional), tuple(remarks), tuple(notes)
        )

    def states(self) -> Tensor:
        taps_TX = self.text.concatenated(self.reading.taps)
        options, eps = self.reading.options, self.shape.eps
        if options["norm_before_fc"]:
            taps_TX = norm(self.tensors, "input_norm", taps_TX, eps)
        if options["fc_norm"]:
            parts = taps_TX.chunk(len(self.reading.taps), -1)
            taps_TX = torch.cat([norm(self.tensors, f"fc_norm.{i}", part, eps) for i, part in enumerate(parts)], -1)
        return linear(self.tensors, "fc", taps_TX)

    def streams(self, embedded_TD: Tensor, state_TD: Tensor, first: int) -> tuple[Tensor, Tensor]:
        embedded_TD = norm(self.layers[0], "input_layernorm", embedded_TD, self.shape.eps)
        normed_TD = norm(self.layers[0], "hidden_norm", state_TD, self.shape.eps)
        residual_TD = normed_TD if self.reading.options["norm_before_residual"] else state_TD
        return torch.cat([embedded_TD, normed_TD], -1), residual_TD

    def next_state(self, output_TD: Tensor) -> Tensor:
        return norm(self.tensors, "norm", output_TD, self.shape.eps) if self.reading.options["norm_output"] else output_TD

    def logits(self, output_D: Tensor) -> Tensor:
        return self.reading.widened(self.shared_logits(norm(self.tensors, "norm", output_D, self.shape.eps)), self.target.vocab)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with that of speculators' decoder layer at the top level."""
    if "speculators_model_type" not in config:
        return dict(config)
    layer = config.get("transformer_layer_config") or {}
    stated = {"norm_before_residual": True} | {name: value for name, value in config.items() if value is not None}   # vLLM's default
    return layer | stated


def _taps(config: Mapping[str, Any], num_layers: int, remarks: list[str]) -> tuple[int, ...]:
    """Return the layers read, ascending, as engines order them; contradictions go to ``remarks``."""
    eagle = config.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise UserError("eagle_config.use_aux_hidden_state is false: the reference engine reads EAGLE-3 heads of tapped layers only")
    top, nested = config.get(IDS), eagle.get(IDS)
    chosen = top or ([tap + 1 for tap in nested] if nested else [2, num_layers // 2, num_layers - 3])
    if top and nested and sorted(top) != sorted(tap + 1 for tap in nested):
        remarks.append(
            f"layer ids disagree: {IDS} {top} counts layers passed, eagle_config's {nested} names layers from 0, so it should be "
            f"{[tap - 1 for tap in top]}; vLLM reads the former, SGLang the latter"
        )
    if any(not isinstance(tap, int) or not 0 <= tap <= num_layers for tap in chosen):
        fault = f"config.json reads the backbone after the layers {chosen}, but it has {num_layers}"
        raise DamagedError(f"{fault}: shifted layer ids, or another backbone")
    return tuple(sorted(set(chosen)))


def _shapes(
    shape: LayerShape, width: int, draft_vocab: int, vocab: int, options: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    D = shape.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, width),
        "norm.weight": (D,),
        "lm_head.weight": (draft_vocab, D),
        "embed_tokens.weight": (vocab, D),
        "layers.0.hidden_norm.weight": (D,),
        **vocabulary_shapes(draft_vocab, vocab),
    }
    for i in range(shape.layers):
        own = layer_shapes(shape, D if i else 2 * D, bool(options["qk_norm"])) | {"input_layernorm.weight": (D,)}
        shapes |= {f"layers.{i}.{name}": size for name, size in own.items()}
    if options["norm_before_fc"]:
        shapes["input_norm.weight"] = (width,)
    if options["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (D,) for i in range(width // D)}
    return shapes


def _names(files: Files, remarks: list[str], notes: list[str]) -> dict[str, str]:
    """Map the names used here to those in the file. A later layer's input norm may be there twice, for vLLM and for SGLang."""
    names = {name.replace("midlayer.", "layers.0.", 1): name for name in files.names}
    for name in sorted(names):
        ours = name.replace("hidden_norm", "input_layernorm")
        if name.endswith(".hidden_norm.weight") and not name.startswith("layers.0."):
            copy_name = names.pop(name)
            if ours not in names:
                names[ours] = copy_name
                notes.append(f"{ours} is missing, which vLLM reads for a later layer; SGLang reads {name}")
            elif not torch.equal(*files.read({"norm": names[ours], "copy": copy_name}).values()):
                remarks.append(f"{ours} and {name} differ, but engines read either as the same norm: swapped or damaged norms")
    return names
