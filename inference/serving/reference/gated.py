"""The decoder layer with gated attention of Qwen3-Next and Qwen3.5: the query projection also gives a gate, and norms are stored less one.

Shape suffixes: T new positions, S all positions, D width, X width of the attention's input, H heads, C head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.inference.serving.reference.layer import KeysValues, LayerShape, Tensors, attend, finish, join, linear
from headstart.inference.serving.reference.rope import rotate

NORMS = ("layernorm.weight", "_norm.weight")


def zero_centred_norm(tensors: Tensors, name: str, x: Tensor, eps: float) -> Tensor:
    """RMSNorm that scales by one plus the weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + tensors[f"{name}.weight"])


def gated_layer(
    tensors: Tensors, streams: Sequence[Tensor], shape: LayerShape, window: int | None, past: KeysValues | None
) -> tuple[Tensor, KeysValues]:
    """Return the layer's output ``[T, D]`` and all keys and values, as `causal_layer` does; it has no window."""
    assert window is None
    x_TX, residual_TD = streams
    first = 0 if past is None else len(past[0])
    positions_T = torch.arange(first, first + len(x_TX))
    query_THC, gate_THC = linear(tensors, "self_attn.q_proj", x_TX).unflatten(-1, (shape.heads, 2 * shape.head_dim)).chunk(2, -1)
    key_THC, value_THC = (linear(tensors, f"self_attn.{name}_proj", x_TX).unflatten(-1, (shape.kv_heads, shape.head_dim)) for name in "kv")
    query_THC = rotate(zero_centred_norm(tensors, "self_attn.q_norm", query_THC, shape.eps), positions_T, shape.rope)
    key_THC = rotate(zero_centred_norm(tensors, "self_attn.k_norm", key_THC, shape.eps), positions_T, shape.rope)
    both = join(past, (key_THC, value_THC))
    mask_TS = torch.arange(first + len(x_TX)) <= positions_T[:, None]
    mixed = attend(query_THC, *both, mask_TS) * gate_THC.flatten(1).sigmoid()
    plain = {name: tensor + 1 if name.endswith(NORMS) else tensor for name, tensor in tensors.items()}
    return finish(plain, residual_TD, mixed, shape.eps), both
