"""Initial weights for a drafter's layers: those of the backbone's decoder layers, if their parameters are named as in Llama."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headstart.heads.backbone.adapter import base_parameters
from headstart.heads.backbone.backbone import Backbone

LAYER = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"), *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight", "post_attention_layernorm.weight",
}  # fmt: skip
NORM = "norm.weight"
"""The norm after the last layer."""
QUERY_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


@torch.no_grad()
def layer_weights(backbone: Backbone, index: int = -1, query_norms: bool = False) -> tuple[dict[str, Tensor], Tensor] | None:
    """Return the weights of a decoder layer (by default the last) by name, and the weight of the final norm; None if the names are
    not Llama's.

    Query and key projections followed by norms (Qwen3) are left out, since their scale differs, unless ``query_norms`` asks for the norms
    too. Weights of norms are the factors they multiply by, also where the backbone stores them less one (Qwen3.5). With a sharded backbone
    all processes must call this.
    """
    names = {name for name in base_parameters(backbone.layers[index], backbone.adapter) if not name.endswith(".bias")}
    decoder = backbone.model.get_decoder()
    final = dict(decoder.named_parameters()).get(NORM)
    norms = names & QUERY_NORMS
    if final is None or names - norms != LAYER or backbone.config.to_dict().get("hidden_act") != "silu":
        return None
    left_out = {*norms, "self_attn.q_proj.weight", "self_attn.k_proj.weight"} if norms and not query_norms else set()
    new_norm: nn.Module = type(decoder.get_submodule("norm"))(1)
    less = 0.0 if new_norm.get_parameter("weight").any() else 1.0  # a weight less one starts at zero
    weights = backbone.layer(index, names - left_out)
    if weights is None:
        return None
    plain = {name: plain_weight(weight) for name, weight in weights.items()}
    return {name: weight + less if weight.dim() == 1 else weight for name, weight in plain.items()}, plain_weight(final) + less


def plain_weight(weight: Tensor) -> Tensor:
    """Return a weight as a plain tensor: gathered if sharded, dequantized if quantized."""
    weight = weight.detach()
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return weight if type(weight) is Tensor else weight.dequantize()
