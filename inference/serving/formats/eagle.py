"""The EAGLE-1 directory that vLLM, SGLang and SafeAILab's own code load: the checkpoint as it is, with a zero ``fc.bias`` for SGLang."""

from __future__ import annotations

from headstart.inference.serving.formats.format import Format


class EagleFormat(Format):
    """Two architectures: vLLM takes ``EagleLlamaForCausalLM``, SGLang ``LlamaForCausalLMEagle``."""

    about = "EAGLE-1 for vLLM, SGLang and SafeAILab's code"
    methods = ("eagle",)
    engines = ("vllm", "sglang")
