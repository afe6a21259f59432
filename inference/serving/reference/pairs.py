"""Drafting with pairs (embedding of the next token, state), as EAGLE, EAGLE-3 and shared MTP modules do.

Row t pairs the token ``x_{t+1}`` with the backbone's state at t. Rows of a draft follow: each pairs the token drafted last with the
state that the layers gave it. Keys of rows of known tokens are computed once for the whole text.

Shape suffixes: T rows, D width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.inference.serving.reference.layer import KeysValues, causal_layer, norm, under
from headstart.inference.serving.reference.reading import Drafting, NextToken, Reading
from headstart.inference.serving.reference.target import Target, Text


class PairDrafting(Drafting):
    """Subclasses say which states are paired, what the first layer reads, and which state goes on."""

    def __init__(self, reading: Reading, target: Target, text: Text) -> None:
        super().__init__(reading, target, text)
        assert reading.layer is not None
        self.shape = reading.layer
        self.layers = self.decoder_layers()
        self.output_TD, self.known = self._run(text.tokens_T[1:], self.states()[:-1], [None] * len(self.layers))

    def decoder_layers(self) -> list[dict[str, Tensor]]:
        """The tensors of each decoder layer, by Llama's names."""
        return [under(self.tensors, f"layers.{i}.") for i in range(self.shape.layers)]

    def layer(self, number: int, streams: tuple[Tensor, Tensor], past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Run a decoder layer over rows that follow ``past``; see `causal_layer`."""
        return causal_layer(self.layers[number], streams, self.shape, self.shape.windows[number], past)

    @abstractmethod
    def states(self) -> Tensor:
        """The backbone's states ``[T, D]`` at all positions."""

    @abstractmethod
    def streams(self, embedded_TD: Tensor, state_TD: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The first layer's attention input and residual stream; ``first``: the number of the first row."""

    def next_streams(self, number: int, output_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The same of a later layer, from the output of the one before."""
        return norm(self.layers[number], "input_layernorm", output_TD, self.shape.eps), output_TD

    @abstractmethod
    def logits(self, output_D: Tensor) -> Tensor:
        """The logits ``[V]`` by the last layer's output."""

    def next_state(self, output_TD: Tensor) -> Tensor:
        """The state that the next draft is paired with."""
        return output_TD

    def _run(self, tokens_T: Tensor, state_TD: Tensor, past: Sequence[KeysValues | None]) -> tuple[Tensor, list[KeysValues]]:
        first = 0 if past[0] is None else len(past[0][0])
        streams, kept = self.streams(self.embed(tokens_T), state_TD, first), []
        for number, before in enumerate(past):
            output_TD, keys_values = self.layer(number, streams, before)
            kept.append(keys_values)
            if number + 1 < len(past):
                streams = self.next_streams(number + 1, output_TD)
        return output_TD, kept

    def after(self, position: int) -> NextToken:
        rows = position - 1   # pairs of known tokens, the last with the root
        past: list[KeysValues] = [(keys[:rows], values[:rows]) for keys, values in self.known]
        output_1D = self.output_TD[rows - 1 : rows]
        root = int(self.text.tokens_T[position - 1])
        drafted = 0

        def next_token(token: int) -> Tensor:
            nonlocal past, output_1D, drafted
            if drafted:
                output_1D, past = self._run(torch.tensor([token]), self.next_state(output_1D), past)
            else:
                assert token == root
            drafted += 1
            return self.logits(output_1D[0])

        return next_token


