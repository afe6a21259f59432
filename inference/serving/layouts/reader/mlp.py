"""MLP speculator (2404.19124), by the names of IBM's accelerators.

``state <- gelu(norm(a * proj_k(state) + b * emb_k(token)))``, a = 0.5 ** (0.5 / n), b = sqrt((1 - a ** 2) * inner_dim / 2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.inference.serving.layouts.reader.base import NextToken, Reader

EPS = 1e-6


class MlpReader(Reader):
    """A recurrent state that starts as the last position's final hidden state; ``reading.options``: depth, inner width, scaling."""

    method = "mlp-speculator"

    @staticmethod
    def depth_of(options: Mapping[str, Any]) -> int:
        return int(options["n_predict"])

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
