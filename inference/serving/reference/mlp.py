"""MLP speculator (2404.19124) under the names of IBM's accelerators.

``state <- gelu(norm(a * proj_k(state) + b * emb_k(token)))``, a = 0.5 ** (0.5 / n), b = sqrt((1 - a ** 2) * inner_dim / 2).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.inference.serving.reference.files import Files
from headstart.inference.serving.reference.reading import Drafting, NextToken, Reading, load, vocabulary_shapes, whole_number
from headstart.inference.serving.reference.target import Target

EPS = 1e-6


class MlpDrafting(Drafting):
    """A recurrent state that starts as the last position's final hidden state."""

    method = "mlp-speculator"

    @classmethod
    def recognises(cls, files: Files) -> bool:
        return files.config.get("model_type") == "mlp_speculator"

    @classmethod
    def read(cls, files: Files, target: Target) -> Reading:
        config = files.config
        n, inner, tied = whole_number(config, "n_predict"), config.get("inner_dim") or target.dim, bool(config.get("tie_weights"))
        D, vocab = config.get("emb_dim") or target.dim, config.get("vocab_size") or target.vocab
        draft_vocab = config.get("draft_vocab_size") or vocab
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(1 if tied else n):
            shapes |= {f"emb.{i}.weight": (vocab, inner), f"head.{i}.weight": (draft_vocab, inner)}
            shapes |= {f"ln.{i}.weight": (inner,), f"ln.{i}.bias": (inner,)}
        for i in range(min(n, 2) if tied else n):
            shapes[f"proj.{i}.weight"] = (inner, inner if i else D)
        tensors = load(files, {name.removeprefix("speculator."): name for name in files.names})
        options = {"n_predict": n, "inner_dim": inner, "scale_input": bool(config.get("scale_input"))}
        shapes |= vocabulary_shapes(draft_vocab, vocab)
        return Reading(cls.method, tensors, shapes, options=options, optional=frozenset({"t2d"}))

    @property
    def max_depth(self) -> int:
        return int(self.reading.options["n_predict"])

    def after(self, position: int) -> NextToken:
        options, depth = self.reading.options, -1
        state_weight = 0.5 ** (0.5 / options["n_predict"])
        emb_weight = math.sqrt((1 - state_weight**2) * options["inner_dim"] / 2)
        state = self.text.hidden_TD[position - 2]
        if options["scale_input"]:
            state = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + EPS) / math.sqrt(2)

        def next_token(token: int) -> Tensor:
            nonlocal state, depth
            depth += 1
            mixed = state_weight * F.linear(state, self._of("proj", depth)) + emb_weight * self._of("emb", depth)[token]
            mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + EPS)
            state = F.gelu(mixed * self._of("ln", depth) + self._of("ln", depth, "bias"))
            return self.reading.widened(F.linear(state, self._of("head", depth)), self.target.vocab)

        return next_token

    def _of(self, name: str, depth: int, kind: str = "weight") -> Tensor:
        """The weights of a depth, or of the last depth that has some where depths share them."""
        while f"{name}.{depth}.{kind}" not in self.tensors and depth:
            depth -= 1
        return self.tensors[f"{name}.{depth}.{kind}"]
