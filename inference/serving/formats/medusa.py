"""The Medusa directory that vLLM up to 0.32, TGI and FasterDecoding's own code load.

The weights are written twice: ``medusa_lm_head.safetensors`` for vLLM and TGI, ``medusa_lm_head.pt`` for FasterDecoding and the TensorRT
backend of TensorRT-LLM up to 1.2.1.
"""

from __future__ import annotations

from headstart.inference.serving.checks import expanded
from headstart.inference.serving.formats.format import Format
from headstart.inference.serving.layout import Layout
from headstart.inference.serving.trained import Dtype, Trained

WHOLE = (
    "output layers are written over the whole vocabulary, since no engine reads truncated ones (vLLM's are broken in 0.32): the rows of "
    "tokens that are not drafted are the mean of the others, so that these tokens are never the likeliest draft"
)


class MedusaFormat(Format):
    """FasterDecoding's names; no ``architectures``, with which TGI refuses the directory."""

    methods = ("medusa",)
    engines = ("vllm", "tgi", "trtllm")

    def lay_out(self, trained: Trained, dtype: Dtype) -> Layout:
        config, tensors = trained.cast(dtype)
        config = {key: value for key, value in config.items() if key != "draft_vocab_size"}
        config |= {"base_model_name_or_path": trained.served}
        if "t2d" in tensors:
            tokens, layer = tensors["t2d"].nonzero().flatten(), f".{config['medusa_num_layers']}.weight"
            heads = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
            vocab = config["vocab_size"]
            tensors = {name: expanded(x, tokens, vocab) if name.endswith(layer) else x for name, x in heads.items()}
        return Layout(config, tensors, "medusa_lm_head.safetensors", pickled_file="medusa_lm_head.pt")

    def notes(self, trained: Trained) -> list[str]:
        copy = "the weights are also written as medusa_lm_head.pt, for FasterDecoding's code"
        return [WHOLE, copy] if "t2d" in trained.tensors else [copy]
