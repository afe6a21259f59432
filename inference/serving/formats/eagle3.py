"""The EAGLE-3 directory that vLLM, SGLang, TensorRT-LLM and SafeAILab's own code load: the checkpoint as it is."""

from __future__ import annotations

from headstart.inference.serving.formats.format import Format


class Eagle3Format(Format):
    """Architecture ``LlamaForCausalLMEagle3``, layers counted in both ways in use."""

    about = "EAGLE-3 for vLLM, SGLang, TensorRT-LLM and SafeAILab's code"
    methods = ("eagle3",)
    engines = ("vllm", "sglang", "trtllm")
