"""The full-attention decoder layer of Qwen3-Next and Qwen3.5: queries and keys normed, rotated in part, and the output gated by the input.

Norm weights are stored less one. Shape suffixes: B batch, T positions, H heads, C head width.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import LlamaConfig

from headstart.heads.layers.decoder_layer import DecoderLayer, Norm, NormedAttention, Rotary


class ZeroCenteredNorm(Norm):
    """RMSNorm that scales by ``1 + weight``."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.to(self.weight.dtype), self.normalized_shape, 1 + self.weight, self.eps)


class GatedAttention(NormedAttention):
    """Attention whose query projection also gives a gate for each entry of the output."""

    norm = ZeroCenteredNorm

    def __init__(self, config: LlamaConfig, width: int) -> None:
        super().__init__(config, width)
        self.q_proj = nn.Linear(width, 2 * self.num_heads * config.head_dim, bias=False)

    def split_queries(self, x: Tensor) -> Tensor:
        return self._queries_and_gate(x)[0]

    def output(self, mixed_BHTC: Tensor, x: Tensor) -> Tensor:
        return super().output(mixed_BHTC * self._queries_and_gate(x)[1].sigmoid(), x)

    def _queries_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The query and the gate of each head, ``[B, H, T, C]``; a head's rows of the projection hold its query, then its gate."""
        query, gate = self.q_proj(x).unflatten(-1, (self.num_heads, 2 * self.head_dim)).transpose(1, 2).chunk(2, -1)
        return query, gate


class GatedLayer(DecoderLayer):
    """A layer with gated attention and zero-centred norms."""

    attention = GatedAttention

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = ZeroCenteredNorm(D, eps=eps), ZeroCenteredNorm(D, eps=eps)

    def start_as(self, layer: Mapping[str, Tensor]) -> bool:
        return super().start_as({name: weight - 1 if weight.dim() == 1 else weight for name, weight in layer.items()})


def partial_rotary(config: LlamaConfig) -> Rotary:
    """Return the rotary embedding of the first ``partial_rotary_factor`` of each head."""
    share = config.rope_parameters.get("partial_rotary_factor") or 1.0
    part = LlamaConfig.from_dict(config.to_dict())
    part.head_dim = int(config.head_dim * share)
    return Rotary(part)

