"""EAGLE-3 as SafeAILab, SpecForge and the engines have it: ``fc``, ``midlayer`` or ``layers.0``, ``norm``, ``lm_head``, ``d2t``.

What a file leaves open is read every way that fits: the counting of layer ids, and for a second layer which of two norms is its input norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.eagle3 import ITS_COPY, SECOND_NORM
from headstart.inference.serving.imports.foreign import Foreign
from headstart.inference.serving.imports.layer_options import layer_arguments, sliding_window
from headstart.inference.serving.imports.pairs import numbered, tap_choices
from headstart.inference.serving.imports.reading import Counting, Reading, Sizes, width_of, without_copies
from headstart.inference.serving.imports.vocabulary import with_vocabulary
from headstart.support.errors import UserError

NAME = "EAGLE-3"
NORMS = ("norm_before_fc", "fc_norm", "norm_output")


def recognises(foreign: Foreign) -> bool:
    names = {numbered(name) for name in foreign.shapes}
    return "fc.weight" in names and any(name.endswith("layers.0.hidden_norm.weight") for name in names)


def sizes(foreign: Foreign) -> Sizes:
    config = foreign.config
    width = config.get("target_hidden_size") or config.get("hidden_size")
    return Sizes(width, width_of(foreign, "t2d") or config.get("vocab_size"))


def readings(foreign: Foreign, backbone: Backbone, counting: Counting | None) -> list[Reading]:
    return read_eagle3(foreign, foreign.config, backbone, tap_choices(foreign.config, backbone.num_layers, counting, foreign.path))


def read_eagle3(
    foreign: Foreign, config: Mapping[str, Any], backbone: Backbone, taps: list[tuple[tuple[int, ...], str]]
) -> list[Reading]:
    """Return a reading for each of ``taps`` and for each norm that may be the second layer's. ``config`` is flat."""
    path, names = foreign.path, {name: ours(name) for name in foreign.shapes}
    tensors = {names[name]: tensor for name, tensor in foreign.read(foreign.shapes).items()}
    origin = {mine: theirs for theirs, mine in names.items() if mine != theirs}
    _require_computable(config, backbone, path)
    tensors, notes = without_copies(tensors, backbone, path, head=False)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = backbone.unembed.weight.detach().cpu()
        notes.append("lm_head is missing and was copied from the backbone")
    tensors, size, of_vocabulary = with_vocabulary(tensors, ["lm_head.weight"], backbone.vocab, path)
    arguments = _arguments(config, tensors, backbone, path) | {"draft_vocab_size": size}
    found = []
    for (chosen, of_taps), (norms, of_norms) in product(taps, _second_norms(tensors, path)):
        choice = "; ".join(part for part in (of_taps, of_norms) if part)
        found.append(Reading("eagle3", {**arguments, "taps": chosen}, {**tensors, **norms}, origin, (*notes, *of_vocabulary), choice))
    return found


def ours(name: str) -> str:
    """Return the name of a tensor in Headstart's EAGLE-3 heads."""
    name = numbered(name)
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _require_computable(config: Mapping[str, Any], backbone: Backbone, path: str) -> None:
    if config.get("hidden_size", backbone.dim) != backbone.dim:
        raise UserError(f"{path} has heads of width {config['hidden_size']}; heads here have the backbone's width, {backbone.dim}")
    if config.get("parallel_drafting") or config.get("ptd_token_id") is not None:
        raise UserError(f"{path} drafts all tokens in parallel (P-EAGLE), which eagle3 heads here do not")
    if not (config.get("eagle_config") or {}).get("use_aux_hidden_state", True):
        raise UserError(f"{path} reads the final hidden state alone (use_aux_hidden_state false), which eagle3 heads here do not")
    if config.get("logit_scale", 1.0) not in (None, 1.0):
        raise UserError(f"{path} scales logits by {config['logit_scale']}, which eagle3 heads here do not")


def _arguments(config: Mapping[str, Any], tensors: Mapping[str, Tensor], backbone: Backbone, path: str) -> dict[str, Any]:
    nested = config.get("eagle_config") or {}
    norms = {key: bool(config.get(key) or nested.get(key)) for key in NORMS}
    layers = 1 + len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    return {
        **layer_arguments(config, backbone, path),
        **norms,
        "layers": layers,
        "sliding_window": sliding_window(config, backbone, path),
        "norm_before_residual": bool(config.get("norm_before_residual") or False),
        "qk_norm": "midlayer.self_attn.q_norm.weight" in tensors,
    }


def _second_norms(tensors: dict[str, Tensor], path: str) -> list[tuple[dict[str, Tensor], str]]:
    """Return what may be the input norm of the second layer, which vLLM and SGLang call differently; nothing for one layer."""
    first, second = tensors.pop(SECOND_NORM, None), tensors.pop(ITS_COPY, None)
    if first is None and second is None:
        return [({}, "")]
    if first is None or second is None or first.equal(second):
        norm = second if first is None else first
        assert norm is not None
        return [({SECOND_NORM: norm, ITS_COPY: norm}, "")]
    return [({SECOND_NORM: norm, ITS_COPY: norm}, f"{name} is the second layer's input norm") for name, norm in
            ((SECOND_NORM, first), (ITS_COPY, second))]  # fmt: skip
