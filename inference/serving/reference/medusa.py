"""Medusa (2401.10774) under both namings: vLLM's ``blocks.k.layers.l``, and FasterDecoding's ``k.l.linear``.

A head is some blocks ``x + silu(Wx + b)`` and an output layer; heads without one share the backbone's (FasterDecoding's version 2).
"""

from __future__ import annotations

import re

import torch.nn.functional as F
from torch import Tensor

from headstart.inference.serving.reference.files import Files
from headstart.inference.serving.reference.layer import linear
from headstart.inference.serving.reference.reading import Drafting, NextToken, Reading, load, vocabulary_shapes
from headstart.inference.serving.reference.target import Target
from headstart.support.errors import UserError

BLOCK = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)|(\d+)\.(\d+)\.linear)\.(weight|bias)")
OUTPUT = re.compile(r"(?:lm_heads\.(\d+)|(\d+)\.(\d+))\.weight")


class MedusaDrafting(Drafting):
    """Heads that read the last position's final hidden state."""

    method = "medusa"

    @classmethod
    def recognises(cls, files: Files) -> bool:
        return files.config.get("model_type") == "medusa" or "medusa_num_heads" in files.config

    @classmethod
    def read(cls, files: Files, target: Target) -> Reading:
        names, remarks = {_canonical(name): name for name in files.names}, []
        tensors = load(files, names)
        heads = 1 + max((int(name.split(".")[1]) for name in names if name.startswith("blocks.")), default=-1)
        layers = 1 + max((int(name.split(".")[3]) for name in names if name.startswith("blocks.")), default=-1)
        if not heads:
            raise UserError(f"{files.folder} holds no Medusa heads: no tensor 0.0.linear.weight or blocks.0.layers.0.weight")
        stated = {key: files.config.get(key) for key in ("medusa_num_heads", "num_heads", "medusa_num_layers", "num_hidden_layers")}
        if (count := stated["medusa_num_heads"] or stated["num_heads"] or heads) != heads:
            remarks.append(f"config.json states {count} heads, the file holds {heads}")
        if (count := stated["medusa_num_layers"] or stated["num_hidden_layers"] or layers) != layers:
            remarks.append(f"config.json states {count} blocks per head, the file holds {layers}")
        biased = any(name.startswith("blocks.") and name.endswith(".bias") and bool(tensor.any()) for name, tensor in tensors.items())
        if biased and not files.config.get("medusa_fc_bias"):
            remarks.append("medusa_fc_bias is not true in config.json, so vLLM drops the biases")
        D, vocab = files.config.get("hidden_size") or target.dim, files.config.get("vocab_size") or target.vocab
        draft_vocab = files.config.get("draft_vocab_size") or vocab
        shapes: dict[str, tuple[int, ...]] = {f"lm_heads.{k}.weight": (draft_vocab, D) for k in range(heads)}
        for k in range(heads):
            shapes |= {f"blocks.{k}.layers.{i}.weight": (D, D) for i in range(layers)}
            shapes |= {f"blocks.{k}.layers.{i}.bias": (D,) for i in range(layers)}
        shared = files.config.get("original_lm_head") or not any(name.startswith("lm_heads.") for name in names)
        optional = {name for name in shapes if name.endswith(".bias") or (shared and name.startswith("lm_heads."))}
        shapes |= vocabulary_shapes(draft_vocab, vocab)
        options = {"heads": heads, "blocks": layers}
        return Reading(cls.method, tensors, shapes, options=options, optional=frozenset(optional | {"t2d"}), remarks=tuple(remarks))

    @property
    def max_depth(self) -> int:
        return int(self.reading.options["heads"])

    def after(self, position: int) -> NextToken:
        hidden_D, depth = self.text.hidden_TD[position - 2], -1

        def next_token(token: int) -> Tensor:
            nonlocal depth
            depth += 1
            return self._head(depth, hidden_D)

        return next_token

    def _head(self, k: int, x_D: Tensor) -> Tensor:
        for i in range(self.reading.options["blocks"]):
            x_D = x_D + F.silu(linear(self.tensors, f"blocks.{k}.layers.{i}", x_D))
        own = next((name for name in (f"lm_heads.{k}", "lm_heads.0") if f"{name}.weight" in self.tensors), None)
        return self.target.logits(x_D) if own is None else self.reading.widened(linear(self.tensors, own, x_D), self.target.vocab)


def _canonical(name: str) -> str:
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if (found := BLOCK.fullmatch(name)) is not None:
        a, b, c, d, kind = found.groups()
        return f"blocks.{a or c}.layers.{b or d}.{kind}"
    if (found := OUTPUT.fullmatch(name)) is not None:
        return f"lm_heads.{found[1] or found[2]}.weight"
    return name
