"""EAGLE-1 and EAGLE-2 as SafeAILab, vLLM and SGLang have it: ``fc`` over embedding and hidden state, one layer without an input norm."""

from __future__ import annotations

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.eagle import BIAS
from headstart.inference.serving.imports.foreign import Foreign
from headstart.inference.serving.imports.layer_options import layer_arguments
from headstart.inference.serving.imports.reading import Counting, Reading, Sizes, without_copies
from headstart.support.errors import UserError

NAME = "EAGLE-1/2"
FURTHER_NORMS = (
    "layers.0.input_layernorm.weight", "norm.weight", "embed_layernorm.weight", "hidden_layernorm.weight", "lm_head_layernorm.weight",
)  # fmt: skip
"""Of variants of EAGLE."""


def recognises(foreign: Foreign) -> bool:
    return "fc.weight" in foreign.shapes and "layers.0.self_attn.q_proj.weight" in foreign.shapes


def sizes(foreign: Foreign) -> Sizes:
    return Sizes(foreign.shapes["fc.weight"][0], foreign.config.get("vocab_size"))


def readings(foreign: Foreign, backbone: Backbone, counting: Counting | None) -> list[Reading]:
    path, config = foreign.path, foreign.config
    if "layers.1.self_attn.q_proj.weight" in foreign.shapes:
        raise UserError(f"{path} has several decoder layers; eagle heads here have one")
    if odd := next((name for name in FURTHER_NORMS if name in foreign.shapes), None):
        raise UserError(f"{path} has a norm {foreign.where(odd)}, which eagle heads here, in vLLM and in SGLang do not have")
    tensors, notes = without_copies(foreign.read(foreign.shapes), backbone, path)
    bias = tensors.get(BIAS)
    if bias is None and config.get("bias", False):
        raise UserError(f"{path} lacks the tensor {BIAS} [{backbone.dim}], and its config.json says bias: true")
    used = bias is not None and bool(bias.any())
    if bias is None:
        tensors[BIAS] = tensors["fc.weight"].new_zeros(len(tensors["fc.weight"]))
    if used:
        notes.append("fc has a bias: SGLang reads it, vLLM drops it")
    return [Reading("eagle", {**layer_arguments(config, backbone, path), "bias": used}, tensors, notes=tuple(notes))]
