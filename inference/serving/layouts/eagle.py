"""EAGLE-1 and EAGLE-2 as SafeAILab, vLLM and SGLang have it: ``fc`` over embedding and hidden state, one layer without an input norm.

The checkpoint as it is has a zero ``fc.bias`` for SGLang.
"""

from __future__ import annotations

from dataclasses import replace

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.eagle import BIAS
from headstart.inference.serving.layouts.checkpoint import Checkpoint
from headstart.inference.serving.layouts.decoder_layer import layer_arguments
from headstart.inference.serving.layouts.files import Files
from headstart.inference.serving.layouts.layout import Counting, Imported, RenamedLayout, Sizes, unscaled_embedding, without_copies
from headstart.inference.serving.layouts.reader.base import Reading, Shapes
from headstart.inference.serving.layouts.reader.eagle import EagleReader
from headstart.inference.serving.layouts.reader.layer import layer_shapes, read_shape
from headstart.support.errors import UserError

FURTHER_NORMS = (
    "layers.0.input_layernorm.weight", "norm.weight", "embed_layernorm.weight", "hidden_layernorm.weight", "lm_head_layernorm.weight",
)  # fmt: skip
"""Of variants of EAGLE."""


class Eagle(RenamedLayout):
    """Two architectures: vLLM takes ``EagleLlamaForCausalLM``, SGLang ``LlamaForCausalLMEagle``."""

    name, title, methods, engines = "eagle", "EAGLE-1/2", ("eagle",), ("vllm", "sglang")
    order = 7
    copies = frozenset({"embed_tokens.weight", "lm_head.weight"})

    def unread(self, heads: Checkpoint) -> dict[str, str]:
        biased = BIAS in heads.tensors and bool(heads.tensors[BIAS].any())
        reasons = {"vllm": "it drops the bias of fc and would draft other tokens"} if biased else {}
        return reasons | unscaled_embedding(heads, self.engines)

    def recognises(self, files: Files) -> bool:
        return "fc.weight" in files.shapes and "layers.0.self_attn.q_proj.weight" in files.shapes

    def read(self, files: Files, on: Sizes, counting: Counting | None = None) -> list[Reading]:
        tensors = files.read()
        biased = BIAS in tensors and bool(tensors[BIAS].any())
        notes = (f"{BIAS} is not zero: SGLang adds it, vLLM drops it",) if biased else ()
        return [Reading(EagleReader, files.config, tensors, notes=notes)]

    def shaped(self, reading: Reading, on: Sizes) -> Reading:
        layer, (V, _) = read_shape(reading.config), on.vocabularies(reading.config)
        D = layer.hidden
        shapes: Shapes = {"fc.weight": (D, 2 * D), BIAS: (D,), "embed_tokens.weight": (V, D), "lm_head.weight": (V, D)}
        for i in range(layer.layers):
            own = layer_shapes(layer, D) | ({"input_layernorm.weight": (D,)} if i else {})
            shapes |= {f"layers.{i}.{name}": size for name, size in own.items()}
        return replace(reading, layer=layer, shapes=shapes, optional=self.copies | {BIAS})

    def imported(self, reading: Reading, files: Files, backbone: Backbone) -> Imported:
        path, config = files.path, files.config
        if "layers.1.self_attn.q_proj.weight" in files.shapes:
            raise UserError(f"{path} has several decoder layers; eagle heads here have one")
        if odd := next((name for name in FURTHER_NORMS if name in files.shapes), None):
            where = f"{odd} {list(files.shapes[odd])} in {path}"
            raise UserError(f"{path} has a norm {where}, which eagle heads here, in vLLM and in SGLang do not have")
        tensors, notes = without_copies(reading.tensors, backbone, path)
        if BIAS not in tensors and config.get("bias", False):
            raise UserError(f"{path} lacks the tensor {BIAS} [{backbone.dim}], and its config.json says bias: true")
        bias = tensors.setdefault(BIAS, tensors["fc.weight"].new_zeros(len(tensors["fc.weight"])))
        arguments = {**layer_arguments(config, backbone, path), "bias": bool(bias.any())}
        return Imported("eagle", arguments, tensors, notes=(*notes, *reading.notes))
