"""Heads that read no keys of their own: Medusa, MLP speculators and draft models.

Medusa (2401.10774), by FasterDecoding's names: a head is some blocks ``x + silu(Wx + b)`` and an output layer; heads without one share the
backbone's (FasterDecoding's version 2).

MLP speculator (2404.19124), by the names of IBM's accelerators: ``state <- gelu(norm(a * proj_k(state) + b * emb_k(token)))``,
a = 0.5 ** (0.5 / n), b = sqrt((1 - a ** 2) * inner_dim / 2).

A draft model is an ordinary causal language model with the backbone's vocabulary (2211.17192), or a parallel one (PARD, 2504.18583), which
reads the text, the root and mask tokens (``pard_token``) in one pass: the logits at the k-th mask draft depth k.
"""

import math
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from plain.base import NextToken, Reader
from plain.layer import linear


class MedusaReader(Reader):
    """Heads that read the last position's final hidden state; ``reading.options``: the numbers of heads and of blocks."""

    @property
    def max_depth(self) -> int:
        return int(self.reading.options["heads"])

    def after(self, position: int) -> NextToken:
        hidden_D, depths = self.text.hidden_TD[position - 2], count()
        return lambda token: self._head(next(depths), hidden_D)

    def _head(self, k: int, x_D: Tensor) -> Tensor:
        blocks = self.reading.options["blocks"]
        for i in range(blocks):
            x_D = x_D + F.silu(linear(self.tensors, f"{k}.{i}.linear", x_D))
        own = next((name for name in (f"{k}.{blocks}", f"0.{blocks}") if f"{name}.weight" in self.tensors), None)
        return self.target.logits(x_D) if own is None else self.reading.widened(linear(self.tensors, own, x_D), self.target.vocab)


EPS = 1e-6


class MlpReader(Reader):
    """A recurrent state that starts as the last position's final hidden state; ``reading.options``: depth, inner width, scaling."""

    @property
    def max_depth(self) -> int:
        return int(self.reading.options["n_predict"])

    def after(self, position: int) -> NextToken:
        options, depths = self.reading.options, count()
        state_weight = 0.5 ** (0.5 / options["n_predict"])
        emb_weight = math.sqrt((1 - state_weight**2) * options["inner_dim"] / 2)
        state = self.text.hidden_TD[position - 2]
        if options["scale_input"]:
            state = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + EPS) / math.sqrt(2)

        def next_token(token: int) -> Tensor:
            nonlocal state
            depth = next(depths)
            mixed = state_weight * F.linear(state, self._of("proj", depth)) + emb_weight * self._of("emb", depth)[token]
            mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + EPS)
            state = F.gelu(mixed * self._of("ln", depth) + self._of("ln", depth, "bias"))
            return self.reading.widened(F.linear(state, self._of("head", depth)), self.target.vocab)

        return next_token

    def _of(self, name: str, depth: int, kind: str = "weight") -> Tensor:
        """The weights of a depth, or of the last depth that has some where depths share them."""
        while f"speculator.{name}.{depth}.{kind}" not in self.tensors and depth:
            depth -= 1
        return self.tensors[f"speculator.{name}.{depth}.{kind}"]


class DraftModelReader(Reader):
    """``reading.options``: the model, and the mask token of a parallel one."""

    def after(self, position: int) -> NextToken:
        model, mask = self.reading.options["model"], self.reading.options["mask"]
        tokens, vocab = self.text.tokens_T[: position - 1].tolist(), self.target.vocab

        def next_token(token: int) -> Tensor:
            tokens.append(token if mask is None or len(tokens) < position else mask)
            logits_V = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            whole_V = logits_V.new_full((vocab,), -torch.inf)  # over the backbone's vocabulary
            whole_V[: len(logits_V)] = logits_V[:vocab]
            return whole_V

        return next_token
