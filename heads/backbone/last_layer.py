"""What a head's layer may start from: the backbone's last one, where its weights are those of a Llama layer by name."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from headstart.heads.backbone.backbone import Backbone

LAYER = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"), *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight", "post_attention_layernorm.weight",
}  # fmt: skip
NORM = "norm.weight"
"""The norm behind the last layer."""
QUERY_NORMS = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


@torch.no_grad()
def last_layer(backbone: Backbone) -> tuple[dict[str, Tensor], Tensor] | None:
    """The weights of the last decoder layer by their names in it, and that of the final norm; None where they are called otherwise.

    Queries and keys that have norms of their own (Qwen3) are left out: they are of other sizes. Of a backbone that is shared out over
    processes, all have to ask.
    """
    own = {name: weight for name, weight in backbone.layers[-1].named_parameters() if not name.endswith(".bias")}
    final = dict(backbone.base.named_parameters()).get(NORM)
    normed = {*own} & QUERY_NORMS
    if final is None or {*own} - normed != LAYER or backbone.config.to_dict().get("hidden_act") != "silu":
        return None
    left_out = {*normed, "self_attn.q_proj.weight", "self_attn.k_proj.weight"} if normed else normed
    return {name: _numbers(weight) for name, weight in own.items() if name not in left_out}, final


def _numbers(weight: Tensor) -> Tensor:
    """Of a weight that may be shared out or quantized."""
    weight = weight.detach()
    weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return weight if type(weight) is Tensor else weight.dequantize()
