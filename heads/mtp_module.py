"""A multi-token prediction module: a hidden state and the next token's embedding, normed, projected and passed through a decoder layer.

Shape suffixes: B batch, T positions, D width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from headstart.heads.kv.cached_layers import CachedLayer
from headstart.heads.layers.decoder_layer import OTHER_STREAM_SCALE, DecoderLayer, Norm, Rotary
from headstart.heads.layers.gated_layer import GatedLayer, ZeroCenteredNorm, partial_rotary


class MtpModule(nn.Module):
    """``norm(layer(eh_proj([enorm(embedding); hnorm(hidden)])))``: the hidden state that drafts a token and goes to the next depth."""

    def __init__(self, config: LlamaConfig, gated: bool = False, hidden_first: bool = False) -> None:
        """``gated``: the layer is a `GatedLayer`. ``hidden_first``: the hidden state comes first in the concatenation."""
        super().__init__()
        D, norm = config.hidden_size, ZeroCenteredNorm if gated else Norm
        self.hidden_first, self.gated = hidden_first, gated
        self.enorm, self.hnorm, self.norm = (norm(D, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * D, D, bias=False)
        self.layer = GatedLayer(config) if gated else DecoderLayer(config)
        self.cached = CachedLayer(self.layer, partial_rotary(config) if gated else Rotary(config))

    def mix(self, embedded_BTD: Tensor, hidden_BTD: Tensor, zero_BT: Tensor | None = None) -> Tensor:
        """Return the layer's input ``[B, T, D]``; embeddings where ``zero_BT`` is True count as zero."""
        if zero_BT is not None:
            embedded_BTD = embedded_BTD.masked_fill(zero_BT[..., None], 0)
        streams = self.enorm(embedded_BTD), self.hnorm(hidden_BTD)
        return self.eh_proj(torch.cat(streams[::-1] if self.hidden_first else streams, -1))

    @torch.no_grad()
    def start(self, last: tuple[Mapping[str, Tensor], Tensor] | None) -> None:
        """Initialise the projection as the identity of the hidden state plus small random parts of the embedding, and biases as zero.

        ``last`` (see `layer_weights`) are the backbone's last layer and norm, which the layer and the last norm start as if it is shaped
        alike.
        """
        D = self.eh_proj.out_features
        hidden, embedded = (slice(0, D), slice(D, None)) if self.hidden_first else (slice(D, None), slice(0, D))
        self.eh_proj.weight[:, hidden] = torch.eye(D)
        self.eh_proj.weight[:, embedded] *= OTHER_STREAM_SCALE
        for name, weight in self.named_parameters():
            if name.endswith(".bias"):
                weight.zero_()
        if last is not None and self.layer.start_as(last[0]):
            self.norm.weight.copy_(last[1] - 1 if self.gated else last[1])
