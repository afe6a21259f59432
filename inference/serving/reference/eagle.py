"""EAGLE-1 and 2 (2401.15077, 2406.16858) as SafeAILab, vLLM and SGLang store them: no input norm in layer 0, no final norm.

Shape suffixes: T rows, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.inference.serving.reference.files import Files
from headstart.inference.serving.reference.layer import layer_shapes, linear, read_shape
from headstart.inference.serving.reference.pairs import PairDrafting
from headstart.inference.serving.reference.reading import Reading, load
from headstart.inference.serving.reference.target import Target

FIRST_NORM = "layers.0.input_layernorm.weight"


class EagleDrafting(PairDrafting):
    """A projection of embedding and final hidden state, a decoder layer, the backbone's output layer."""

    method = "eagle"

    @classmethod
    def recognises(cls, files: Files) -> bool:
        pairs = "fc.weight" in files.names and "layers.0.self_attn.q_proj.weight" in files.names
        return pairs and not {"hidden_norm.weight", "layers.0.hidden_norm.weight"} & files.names

    @classmethod
    def read(cls, files: Files, target: Target) -> Reading:
        shape = read_shape(files.config)
        D, vocab = shape.hidden, files.config.get("vocab_size") or target.vocab
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, 2 * D), "fc.bias": (D,)}
        shapes |= {"embed_tokens.weight": (vocab, D), "lm_head.weight": (vocab, D)}
        for i in range(shape.layers):
            own = layer_shapes(shape, D) | ({"input_layernorm.weight": (D,)} if i else {})
            shapes |= {f"layers.{i}.{name}": size for name, size in own.items()}
        tensors = load(files, {name: name for name in files.names})
        notes = []
        if "fc.bias" in tensors and bool(tensors["fc.bias"].any()):
            notes.append("fc.bias is not zero: SGLang adds it, vLLM drops it")
        optional = frozenset({"fc.bias", "embed_tokens.weight", "lm_head.weight"})
        return Reading(cls.method, tensors, shapes, (), shape, {}, optional, notes=tuple(notes))

    def states(self) -> Tensor:
        return self.text.hidden_TD

    def streams(self, embedded_TD: Tensor, state_TD: Tensor, first: int) -> tuple[Tensor, Tensor]:
        mixed_TD = linear(self.tensors, "fc", torch.cat([embedded_TD, state_TD], -1))
        return mixed_TD, mixed_TD

    def logits(self, output_D: Tensor) -> Tensor:
        return self.shared_logits(output_D)
