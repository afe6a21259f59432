"""IBM's MLP speculator directory, which TGI and vLLM up to 0.9.2 load."""

from __future__ import annotations

from headstart.inference.serving.checks import expanded
from headstart.inference.serving.formats.format import Format
from headstart.inference.serving.formats.medusa import WHOLE
from headstart.inference.serving.layout import Layout
from headstart.inference.serving.trained import Dtype, Trained


class MlpSpeculatorFormat(Format):
    """The checkpoint as it is, over the whole vocabulary."""

    methods = ("mlp",)
    engines = ("vllm", "tgi")

    def lay_out(self, trained: Trained, dtype: Dtype) -> Layout:
        config, tensors = trained.cast(dtype)
        config = {key: value for key, value in config.items() if key != "draft_vocab_size"}
        config |= {"base_model_name_or_path": trained.served}
        if "t2d" in tensors:
            tokens, vocab = tensors["t2d"].nonzero().flatten(), config["vocab_size"]
            heads = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
            tensors = {name: expanded(x, tokens, vocab) if ".head." in name else x for name, x in heads.items()}
        return Layout(config, tensors, "model.safetensors")

    def unread(self, trained: Trained) -> dict[str, str]:
        return {} if trained.config["tie_weights"] else {"tgi": "it reads speculators with drafter.tie_weights only"}

    def notes(self, trained: Trained) -> list[str]:
        return [WHOLE] if "t2d" in trained.tensors else []
