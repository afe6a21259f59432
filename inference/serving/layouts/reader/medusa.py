"""Medusa (2401.10774): a head is some blocks ``x + silu(Wx + b)`` and an output layer, by FasterDecoding's names.

Heads without an output layer share the backbone's (FasterDecoding's version 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from headstart.inference.serving.layouts.reader.base import NextToken, Reader
from headstart.inference.serving.layouts.reader.layer import linear


class MedusaReader(Reader):
    """Heads that read the last position's final hidden state; ``reading.options``: the numbers of heads and of blocks."""

    method = "medusa"

    @staticmethod
    def depth_of(options: Mapping[str, Any]) -> int:
        return int(options["heads"])

    def after(self, position: int) -> NextToken:
        hidden_D, depths = self.text.hidden_TD[position - 2], count()
        return lambda token: self._head(next(depths), hidden_D)

    def _head(self, k: int, x_D: Tensor) -> Tensor:
        blocks = self.reading.options["blocks"]
        for i in range(blocks):
            x_D = x_D + F.silu(linear(self.tensors, f"{k}.{i}.linear", x_D))
        own = next((name for name in (f"{k}.{blocks}", f"0.{blocks}") if f"{name}.weight" in self.tensors), None)
        return self.target.logits(x_D) if own is None else self.reading.widened(linear(self.tensors, own, x_D), self.target.vocab)
