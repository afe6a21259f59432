"""Heads that continue pairs (embedding of the next token, state): EAGLE-1 to 3.1 and multi-token prediction modules.

EAGLE-1 and 2 (2401.15077, 2406.16858), EAGLE-3 and 3.1 (2503.01840, 2605.09992): row t pairs the token ``x_{t+1}`` with the backbone's
state at t. Rows of a draft follow: each pairs the token drafted last with the state that the layers gave it. Keys of rows of known tokens
are computed once for the whole text. In P-EAGLE (2602.01469) the rows of a draft pair the mask token with the fusion of ``mask_hidden``.

Multi-token prediction modules (DeepSeek-V3, 2412.19437) with dense layers: ``norm(layer(eh_proj([enorm(embedding); hnorm(hidden)])))``
drafts a token and is the next depth's hidden state. One module drafts all depths as pairs do; with several, module k runs over all
positions, with the outputs of module k - 1 and the tokens k + 1 later.

Shape suffixes: T rows, D width, X taps concatenated.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from plain.base import NextToken, Reader, Reading, Target, Text
from plain.layer import KeysValues, causal_layer, gated_layer, linear, norm, under, zero_centred_norm


class PairReader(Reader):
    """Subclasses say which states are paired, what the first layer reads, and which state goes on."""

    def __init__(self, reading: Reading, target: Target, text: Text) -> None:
        super().__init__(reading, target, text)
        self.layers = self.decoder_layers()
        self.output_TD, self.known = self._run(text.tokens_T[1:], self.states()[:-1], [None] * len(self.layers))

    def decoder_layers(self) -> list[dict[str, Tensor]]:
        """The tensors of each decoder layer, by Llama's names."""
        return [under(self.tensors, f"layers.{i}.") for i in range(self.shape.layers)]

    def layer(self, number: int, streams: tuple[Tensor, Tensor], past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Run a decoder layer over rows that follow ``past``; see `causal_layer`."""
        return causal_layer(self.layers[number], streams, self.shape, self.shape.windows[number], past)

    def states(self) -> Tensor:
        """The backbone's states ``[T, D]`` at all positions."""
        return self.text.hidden_TD

    @abstractmethod
    def streams(self, embedded_TD: Tensor, state_TD: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The first layer's attention input and residual stream; ``first``: the number of the first row."""

    def logits(self, output_D: Tensor) -> Tensor:
        """The logits ``[V]`` by the last layer's output."""
        return self.shared_logits(output_D)

    def next_state(self, output_TD: Tensor) -> Tensor:
        return output_TD

    def following(self, token: int, output_1D: Tensor) -> tuple[Tensor, Tensor]:
        """The token of a draft's next row, after ``token`` and the layers' output, and the state that it is paired with."""
        return torch.tensor([token]), self.next_state(output_1D)

    def _run(self, tokens_T: Tensor, state_TD: Tensor, past: Sequence[KeysValues | None]) -> tuple[Tensor, list[KeysValues]]:
        first = 0 if past[0] is None else len(past[0][0])
        streams, kept = self.streams(self.embed(tokens_T), state_TD, first), []
        for number, before in enumerate(past):
            output_TD, keys_values = self.layer(number, streams, before)
            kept.append(keys_values)
            if number + 1 < len(past):
                streams = norm(self.layers[number + 1], "input_layernorm", output_TD, self.shape.eps), output_TD
        return output_TD, kept

    def after(self, position: int) -> NextToken:
        rows = position - 1  # pairs of known tokens, the last with the root
        past: list[KeysValues] = [(keys[:rows], values[:rows]) for keys, values in self.known]
        output_1D = self.output_TD[rows - 1 : rows]
        drafted = 0

        def next_token(token: int) -> Tensor:
            nonlocal past, output_1D, drafted
            if drafted:
                output_1D, past = self._run(*self.following(token, output_1D), past)
            drafted += 1
            return self.logits(output_1D[0])

        return next_token


class EagleReader(PairReader):
    """A projection of embedding and final hidden state, a decoder layer without an input norm, the backbone's output layer."""

    def streams(self, embedded_TD: Tensor, state_TD: Tensor, first: int) -> tuple[Tensor, Tensor]:
        mixed_TD = linear(self.tensors, "fc", torch.cat([embedded_TD, state_TD], -1))
        return mixed_TD, mixed_TD


class Eagle3Reader(PairReader):
    """A draft with ``reading.options``: ``norm_before_residual``, ``norm_before_fc``, ``fc_norm`` and ``norm_output``."""

    def states(self) -> Tensor:
        return self.fused(self.text.concatenated(self.reading.taps))

    def fused(self, taps_TX: Tensor) -> Tensor:
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


class PeagleReader(Eagle3Reader):
    """EAGLE-3 whose drafts depend on no drafted token; ``reading.options`` has the ``mask`` token too."""

    def following(self, token: int, output_1D: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tensor([self.reading.options["mask"]]), self.fused(self.tensors["mask_hidden"].flatten()[None])


class MtpReader(PairReader):
    """``reading.options``: the family and the number of modules.

    MiMo's projection reads the hidden state, then the embedding. The embedding at position 0 is zero, but not in Qwen3.5, which has gated
    attention with zero-centred norms.
    """

    def __init__(self, reading: Reading, target: Target, text: Text) -> None:
        self.hidden_first, self.gated = reading.options["family"] == "mimo", reading.options["family"] == "qwen3_5"
        self.modules = [under(reading.tensors, f"mtp.{i}.") for i in range(reading.options["modules"])]
        (PairReader if len(self.modules) == 1 else Reader).__init__(self, reading, target, text)

    @property
    def max_depth(self) -> int | None:
        return None if len(self.modules) == 1 else len(self.modules)

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
