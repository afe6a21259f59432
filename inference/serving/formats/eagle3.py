"""The EAGLE-3 directory that vLLM, SGLang and TensorRT-LLM load as it is, and SafeAILab's own code if ``norm_output`` is false."""

from __future__ import annotations

from headstart.inference.serving.formats.format import Format
from headstart.inference.serving.shapes import has_qk_norm
from headstart.inference.serving.trained import Trained


class Eagle3Format(Format):
    """Architecture ``LlamaForCausalLMEagle3``, layers counted in both ways in use."""

    methods = ("eagle3",)
    engines = ("vllm", "sglang", "trtllm")

    def unread(self, trained: Trained) -> dict[str, str]:
        reasons = {}
        if trained.config.get("attention_bias"):
            reasons["sglang"] = "it has no biases of queries, keys and values in EAGLE-3"
        if has_qk_norm(trained.config):
            reasons |= dict.fromkeys(("sglang", "trtllm"), "it has no EAGLE-3 module that norms queries and keys (drafter.qk_norm)")
        if trained.config["norm_before_residual"]:
            reasons |= dict.fromkeys(("sglang", "trtllm"), "it ignores norm_before_residual and would draft other tokens")
        return reasons
