"""The decoder layer of an EAGLE-type head, Llama-shaped, over pairs (embedding, state); and its rotary table.

Shape suffixes: B batch, T positions, N nodes, S keys, D width, H heads, C head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.layers.causal_attention import Blocks, attend_past, join

EMBEDDED = 0.1
"""Of what reads the embedding in a layer that starts as the backbone's: as much as keeps its first steps from disturbing the rest."""
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, ``[B, 1, T, C]``; as a table ``[positions, C]``."""


@dataclass(frozen=True)
class Frequencies:
    """What the rotation of any position is computed from, where a table would grow with the text."""

    per_C: Tensor
    """Radians a position."""
    scale_1: Tensor
    """Of cosines and sines."""


def llama_like(backbone: Backbone, intermediate_size: int | None) -> LlamaConfig:
    """The configuration of one Llama layer with the backbone's widths, heads, context and rotary base."""
    own: dict[str, Any] = backbone.config.to_dict()
    heads = backbone.config.num_attention_heads
    rope = own.get("rope_parameters")
    if not rope or "rope_type" not in rope:
        rope = (rope or {}).get("full_attention") or {"rope_type": "default", "rope_theta": 10000.0}
    return LlamaConfig(
        vocab_size=backbone.vocab,
        hidden_size=backbone.dim,
        intermediate_size=intermediate_size or own.get("intermediate_size") or 4 * backbone.dim,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=own.get("num_key_value_heads") or heads,
        head_dim=own.get("head_dim") or backbone.dim // heads,
        max_position_embeddings=backbone.max_positions or 2048,
        rms_norm_eps=own.get("rms_norm_eps") or 1e-6,
        rope_parameters=dict(rope),
        bos_token_id=own.get("bos_token_id"),
        eos_token_id=own.get("eos_token_id"),
        pad_token_id=own.get("pad_token_id"),
        tie_word_embeddings=False,
    )


class Rotary(nn.Module):
    """Positions -> cosines and sines."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.compute = [LlamaRotaryEmbedding(config)]  # no submodule: .to(bfloat16) would round its frequencies

    def table(self, positions: int, device: torch.device) -> Rotation:
        """Cosines and sines ``[positions, C]`` of all positions below that."""
        places = torch.arange(positions)[None]
        cos, sin = self.compute[0](places.float(), places)
        return cos[0].to(device), sin[0].to(device)

    def frequencies(self, device: torch.device) -> Frequencies:
        """Those of texts of the lengths that the configuration was made for."""
        found = self.compute[0].original_inv_freq.float().repeat(2)
        return Frequencies(found.to(device), torch.full((1,), float(self.compute[0].attention_scaling), device=device))

    def forward(self, first: int, count: int, device: torch.device) -> Rotation:
        """Of ``count`` positions from ``first`` on: ``[1, 1, count, C]``."""
        cos, sin = self.table(first + count, device)
        return cos[None, None, first:], sin[None, None, first:]


def rotary_at(turns: Rotation | Frequencies, positions_BT: Tensor) -> Rotation:
    """The rotation of each position, ``[B, 1, T, C]``, from a table or from frequencies."""
    if isinstance(turns, Frequencies):
        angles_B1TC = positions_BT[:, None, :, None].float() * turns.per_C
        return angles_B1TC.cos() * turns.scale_1, angles_B1TC.sin() * turns.scale_1
    return turns[0][positions_BT][:, None], turns[1][positions_BT][:, None]


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its weight, whatever autocast hands it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def rotate(x_BHTC: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    low, high = x_BHTC.chunk(2, -1)
    return (x_BHTC * cos + torch.cat([-high, low], -1) * sin).to(x_BHTC.dtype)


class PairAttention(nn.Module):
    """Grouped-query attention over inputs of twice the width."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        C, D = config.head_dim, config.hidden_size
        self.num_heads, self.num_kv, self.head_dim = config.num_attention_heads, config.num_key_value_heads, C
        self.q_proj = nn.Linear(2 * D, self.num_heads * C, bias=False)
        self.k_proj = nn.Linear(2 * D, self.num_kv * C, bias=False)
        self.v_proj = nn.Linear(2 * D, self.num_kv * C, bias=False)
        self.o_proj = nn.Linear(self.num_heads * C, D, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


class PairLayer(nn.Module):
    """norm(embedding) beside norm(state) -> attention -> feed-forward, both added to the state (2503.01840)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(D, eps=eps)
        self.hidden_norm = Norm(D, eps=eps)
        self.post_attention_layernorm = Norm(D, eps=eps)
        self.self_attn = PairAttention(config)
        self.mlp = LlamaMLP(config)

    @torch.no_grad()
    def start_as(self, layer: Mapping[str, Tensor]) -> bool:
        """Take over the weights of a decoder layer of these shapes, by Llama's names; False, and nothing taken, if a shape differs.

        What reads the state becomes that layer's; what reads the embedding stays as it was drawn, at a tenth.
        """
        own = {name: self.get_parameter(name.replace("input_layernorm", "hidden_norm")) for name in layer}
        parts = {name: weight[..., -layer[name].shape[-1] :] for name, weight in own.items()}
        if any(part.shape != layer[name].shape for name, part in parts.items()):
            return False
        for name, part in parts.items():
            part.copy_(layer[name])
            own[name][..., : -part.shape[-1]] *= EMBEDDED
        return True

    def pair(self, embedded_BTD: Tensor, state_BTD: Tensor) -> Tensor:
        """``[B, T, 2D]``: what queries, keys and values are made of."""
        return torch.cat([self.input_layernorm(embedded_BTD.to(state_BTD.dtype)), self.hidden_norm(state_BTD)], -1)

    def keys_values(self, pair: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        attn = self.self_attn
        return rotate(attn.split(attn.k_proj(pair), attn.num_kv), rotation), attn.split(attn.v_proj(pair), attn.num_kv)

    def finish(self, state: Tensor, mixed_BHTC: Tensor) -> Tensor:
        state = state + self.self_attn.o_proj(mixed_BHTC.transpose(1, 2).flatten(2))
        return state + self.mlp(self.post_attention_layernorm(state))

    def attend(self, pair: Tensor, state: Tensor, rotation: Rotation, past: tuple[Tensor, Tensor], see_BNS: Tensor) -> Tensor:
        """Decoding: N nodes look at the keys they may see."""
        attn = self.self_attn
        query = rotate(attn.split(attn.q_proj(pair), attn.num_heads), rotation)
        grouped = attn.num_kv != attn.num_heads
        mixed = nn.functional.scaled_dot_product_attention(query, past[0], past[1], attn_mask=see_BNS[:, None], enable_gqa=grouped)
        return self.finish(state, mixed)

    def taught(
        self, embedded: Tensor, state: Tensor, passes: Sequence[tuple[Tensor, Tensor]], rotary: Rotary, blocks: Blocks
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Training, pass ``len(passes)`` at all positions: the new states, and this pass's keys and values.

        Position t stands at t + pass for its rotation; it sees the first pass up to t and the later passes at t alone.
        """
        attn, k, T = self.self_attn, len(passes), state.shape[1]
        rotation = rotary(k, T, state.device)
        pair = self.pair(embedded, state)
        query = rotate(attn.split(attn.q_proj(pair), attn.num_heads), rotation)
        own = self.keys_values(pair, rotation)
        first, *later = ((keys[:, :, :T], values[:, :, :T]) for keys, values in (*passes, own))
        mixed, logsum = attend_past(query, *first, blocks)
        return self.finish(state, join(query, mixed, logsum, later) if later else mixed), own
