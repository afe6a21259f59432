"""The directory of DFlash, DSpark and Domino heads that vLLM, SGLang and TensorRT-LLM load: the checkpoint as it is."""

from __future__ import annotations

from headstart.inference.serving.formats.format import Format, embedding_unread
from headstart.inference.serving.trained import Trained


class DflashFormat(Format):
    """Embedding and output layer are the backbone's; no file of a mask embedding, since the mask is a token of the backbone."""

    methods = ("dflash", "dspark", "domino")
    engines = ("vllm", "sglang", "trtllm")

    def unread(self, trained: Trained) -> dict[str, str]:
        if trained.config["dflash_config"].get("causal"):
            return dict.fromkeys(self.engines, "it reads causal blocks (drafter.causal) in the layout speculators alone")
        return embedding_unread(trained, self.engines)
