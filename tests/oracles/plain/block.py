"""Parallel block heads: DFlash (2602.06036), DFlash2, DSpark (2607.05147) and Domino (2605.29707).

Element i of a block is at the position i after the root, which is element 0; the others are mask tokens. All attend to one another and
to keys and values of the context, ``hidden_norm(fc(taps))``, at the positions read. With ``anchored`` element i drafts depth i, otherwise
element i + 1.

DFlash2 mixes x_t and x_{t-1} of a block, before and after attention and the feed-forward part: channel c of tap a is weighted by
``base[side, a, c] + delta_t[side, a, c // 16]``, where delta is a projection of the sublayer's normed input. Of the logits the largest k
get ``sum_r predecessor[parent, r] * (P h)_r * successor[c, r]`` added; of the others, which are not drafted, no more than the least of
these is left, as Headstart has it.

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
            elif options["correction"] == "selector":
                logits = self._selected(logits, drafted_ND[depth], token)
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
            attend_to = convolved(layer, "attention_conv.", x_ND, x_ND, 0)
            both = join((keys[:first], values[:first]), keys_values(layer, attend_to, shape, positions_N))
            mixed = attend(queries(layer, attend_to, shape, positions_N), *both, mask_NS)
            if "mlp_conv.base_kernel" not in layer:
                block_ND = finish(layer, block_ND, mixed, shape.eps)
                continue
            block_ND = block_ND + convolved(layer, "attention_conv.", linear(layer, "self_attn.o_proj", mixed), x_ND, 1)
            x_ND = norm(layer, "post_attention_layernorm", block_ND, shape.eps)
            read_ND = convolved(layer, "mlp_conv.", x_ND, x_ND, 0)
            inner = F.silu(linear(layer, "mlp.gate_proj", read_ND)) * linear(layer, "mlp.up_proj", read_ND)
            block_ND = block_ND + convolved(layer, "mlp_conv.", linear(layer, "mlp.down_proj", inner), x_ND, 1)
        return norm(self.tensors, "norm", block_ND, shape.eps)

    def _selected(self, logits_V: Tensor, hidden_D: Tensor, parent: int) -> Tensor:
        found = under(self.tensors, "candidate_selector.")
        projected_R = found["hidden_projection.weight"] @ hidden_D
        best = sorted(range(len(logits_V)), key=lambda token: -float(logits_V[token]))[: self.reading.options["candidates"]]
        context_R = found["predecessor_codebook"][parent] * projected_R
        scores = {token: logits_V[token] + context_R.dot(found["successor_codebook"][token]) for token in best}
        least = min(scores.values())
        return torch.stack([scores.get(token, torch.minimum(logits_V[token], least)) for token in range(len(logits_V))])


def convolved(layer: dict[str, Tensor], name: str, x_ND: Tensor, normed_ND: Tensor, side: int) -> Tensor:
    """Mix the elements of a block; without a convolution they stay as they are."""
    if f"{name}base_kernel" not in layer:
        return x_ND
    _, taps, D = layer[f"{name}base_kernel"].shape
    out_ND = torch.zeros_like(x_ND)
    for t, normed_D in enumerate(normed_ND):
        delta = (layer[f"{name}kernel_projection.weight"] @ normed_D).view(2, taps, D // 16)
        for tap in range(min(taps, t + 1)):
            for c in range(D):
                out_ND[t, c] += (layer[f"{name}base_kernel"][side, tap, c] + delta[side, tap, c // 16]) * x_ND[t - tap, c]
    return out_ND
