"""The EAGLE-1 directory that vLLM, SGLang and SafeAILab's own code load: the checkpoint as it is, with a zero ``fc.bias`` for SGLang."""

from __future__ import annotations

from headstart.inference.serving.formats.format import Format, embedding_unread
from headstart.inference.serving.trained import Trained


class EagleFormat(Format):
    """Two architectures: vLLM takes ``EagleLlamaForCausalLM``, SGLang ``LlamaForCausalLMEagle``."""

    methods = ("eagle",)
    engines = ("vllm", "sglang")

    def unread(self, trained: Trained) -> dict[str, str]:
        biased = "fc.bias" in trained.tensors and bool(trained.tensors["fc.bias"].any())
        reasons = {"vllm": "it drops the bias of fc and would draft other tokens"} if biased else {}
        return reasons | embedding_unread(trained, self.engines)
