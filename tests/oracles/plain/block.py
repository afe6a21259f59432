"""Parallel block heads: DFlash (2602.06036), DSpark (2607.05147) and Domino (2605.29707).

Element i of a block is at the position i after the root, which is element 0; the others are mask tokens. All attend to one another and
to keys and values of the context, ``hidden_norm(fc(taps))``, at the positions read. With ``anchored`` element i drafts depth i, otherwise
element i + 1.

Shape suffixes: T positions, N elements, D width, G size of the GRU's state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from plain.base import NextToken, Reader, Reading, Target, Text
from plain.layer import KeysValues, attend, finish, join, keys_values, linear, norm, queries, under


class BlockReader(Reader):
    """One pass over a block; ``reading.options``: elements, mask, anchored, causal, and the kind of the correction of logits."""

    def __init__(self, reading: Reading, target: Target, text: Text) -> None:
        super().__init__(reading, target, text)
        self.layers = [under(self.tensors, f"layers.{i}.") for i in range(self.shape.layers)]
        context_TD = norm(self.tensors, "hidden_norm", linear(self.tensors, "fc", text.concatenated(reading.taps)), self.shape.eps)
        positions_T = torch.arange(len(context_TD))
        self.known: list[KeysValues] = [keys_values(layer, context_TD, self.shape, positions_T) for layer in self.layers]

    @property
    def max_depth(self) -> int:
        return int(self.reading.options["elements"]) - (0 if self.reading.options["anchored"] else 1)

    def after(self, position: int) -> NextToken:
        options = self.reading.options
        drafted_ND = self._block(position)[0 if options["anchored"] else 1 :]
        depth, path_1G = -1, None

        def next_token(token: int) -> Tensor:
            nonlocal depth, path_1G
            depth += 1
            logits = self.shared_logits(drafted_ND[depth])
            if options["correction"] == "markov":
                logits = logits + linear(self.tensors, "markov_head.markov_w2", self.tensors["markov_head.markov_w1.weight"][token])
            elif options["correction"] == "recurrent":
                gates = self.tensors["prefix_gru.weight_ih_l0"], self.tensors["prefix_gru.weight_hh_l0"]
                path_1G = gates[1].new_zeros(1, gates[1].shape[1]) if path_1G is None else path_1G
                path_1G = torch.gru_cell(self.embed(torch.tensor([token])), path_1G, *gates)
                if depth:  # depth 0 is drafted without a correction
                    mixed = F.silu(linear(self.tensors, "embed_proj.0", torch.cat([drafted_ND[depth], path_1G[0]])))
                    logits = logits + linear(self.tensors, "embed_proj.2", mixed)
            return self.reading.widened(logits, self.target.vocab)

        return next_token

    def _block(self, position: int) -> Tensor:
        """The normed hidden states ``[N, D]`` of the block after that many tokens."""
        first, N, shape = position - 1, self.reading.options["elements"], self.shape
        root = int(self.text.tokens_T[first])
        block_ND = self.embed(torch.tensor([root] + [self.reading.options["mask"]] * (N - 1)))
        positions_N = torch.arange(first, first + N)
        seen_NS = torch.ones(N, first + N, dtype=torch.bool)
        if self.reading.options["causal"]:
            seen_NS = seen_NS.tril(first)
        distance_NS = positions_N[:, None] - torch.arange(first + N)
        for layer, window, (keys, values) in zip(self.layers, shape.windows, self.known, strict=True):
            x_ND = norm(layer, "input_layernorm", block_ND, shape.eps)
            mask_NS = seen_NS & (distance_NS < (window or 1 << 40))
            both = join((keys[:first], values[:first]), keys_values(layer, x_ND, shape, positions_N))
            block_ND = finish(layer, block_ND, attend(queries(layer, x_ND, shape, positions_N), *both, mask_NS), shape.eps)
        return norm(self.tensors, "norm", block_ND, shape.eps)
