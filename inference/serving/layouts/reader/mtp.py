"""Multi-token prediction modules (DeepSeek-V3, 2412.19437) with dense layers.

``norm(layer(eh_proj([enorm(embedding); hnorm(hidden)])))`` drafts a token and is the next depth's hidden state. One module drafts all
depths as pairs do; with several, module k runs over all positions, with the outputs of module k - 1 and the tokens k + 1 later.

Shape suffixes: T rows, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headstart.inference.serving.layouts.reader.base import NextToken, Reader, Reading, Target, Text
from headstart.inference.serving.layouts.reader.eagle import PairReader
from headstart.inference.serving.layouts.reader.layer import KeysValues, causal_layer, gated_layer, linear, norm, under, zero_centred_norm


class MtpReader(PairReader):
    """``reading.options``: the family and the number of modules.

    MiMo's projection reads the hidden state, then the embedding. The embedding at position 0 is zero, but not in Qwen3.5, which has gated
    attention with zero-centred norms.
    """

    method = "mtp"

    def __init__(self, reading: Reading, target: Target, text: Text) -> None:
        self.hidden_first, self.gated = reading.options["family"] == "mimo", reading.options["family"] == "qwen3_5"
        self.modules = [under(reading.tensors, f"mtp.{i}.") for i in range(reading.options["modules"])]
        (PairReader if len(self.modules) == 1 else Reader).__init__(self, reading, target, text)

    @staticmethod
    def depth_of(options: Mapping[str, Any]) -> int | None:
        return None if options["modules"] == 1 else int(options["modules"])

    # One module, applied to its own output.

    def streams(self, embedded_TD: Tensor, state_TD: Tensor, first: int) -> tuple[Tensor, Tensor]:
        mixed_TD = self._mix(self.modules[0], embedded_TD, state_TD, zero=first == 0)
        return self._norm(self.modules[0], "layer.input_layernorm", mixed_TD), mixed_TD

    def decoder_layers(self) -> list[dict[str, Tensor]]:
        return [under(self.modules[0], "layer.")]

    def layer(self, number: int, streams: tuple[Tensor, Tensor], past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        return self._layer(self.modules[0], streams, past)

    def next_state(self, output_TD: Tensor) -> Tensor:
        return self._norm(self.modules[0], "norm", output_TD)

    def logits(self, output_D: Tensor) -> Tensor:
        return self.target.logits(self._norm(self.modules[0], "norm", output_D))

    # Several modules.

    def after(self, position: int) -> NextToken:
        if len(self.modules) == 1:
            return super().after(position)
        hidden_TD, depth = self.text.hidden_TD[: position - 1], -1
        tokens = self.text.tokens_T[: position - 1].tolist()

        def next_token(token: int) -> Tensor:
            nonlocal hidden_TD, depth
            depth += 1
            tokens.append(token)
            hidden_TD = self._module(depth, torch.tensor(tokens[depth + 1 :]), hidden_TD)
            return self.target.logits(hidden_TD[-1])

        return next_token

    def _module(self, k: int, tokens_T: Tensor, hidden_TD: Tensor) -> Tensor:
        """The outputs of module k at all rows, normed."""
        module = self.modules[k]
        mixed_TD = self._mix(module, self.embed(tokens_T), hidden_TD, zero=k == 0)
        x_TD = self._norm(module, "layer.input_layernorm", mixed_TD)
        return self._norm(module, "norm", self._layer(module, (x_TD, mixed_TD), None)[0])

    # Both.

    def _mix(self, module: Mapping[str, Tensor], embedded_TD: Tensor, hidden_TD: Tensor, zero: bool) -> Tensor:
        if zero and not self.gated:
            embedded_TD = torch.cat([torch.zeros_like(embedded_TD[:1]), embedded_TD[1:]])
        both = [self._norm(module, "enorm", embedded_TD), self._norm(module, "hnorm", hidden_TD)]
        return linear(module, "eh_proj", torch.cat(both[::-1] if self.hidden_first else both, -1))

    def _layer(self, module: Mapping[str, Tensor], streams: tuple[Tensor, Tensor], past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        run = gated_layer if self.gated else causal_layer
        return run(under(module, "layer."), streams, self.shape, None, past)

    def _norm(self, module: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
        return (zero_centred_norm if self.gated else norm)(module, name, x, self.shape.eps)
