"""Logits of SGLang's own EAGLE modules on a CPU; run by the Python of .venv-engines, where SGLang's package lies beside it.

    python -I sglang_driver.py PACKAGES HEADS INPUTS.safetensors RESULT.safetensors

SGLang needs packages that have no CPU build; they are replaced by empty ones (`Absent`), which is enough for the modules of the heads. Its
attention needs its server's KV cache and is replaced by torch's, causal over one sequence; weights, names, norms, rotary embedding and all
other arithmetic are SGLang's. ``INPUTS`` holds ``ids_T``, ``hidden_TX`` (what the engine passes: concatenated taps, or the final hidden
state), ``embed_VD`` and ``unembed_VD``; the result is ``logits_TV``, of EAGLE-3 over its draft vocabulary.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ABSENT = (
    "IPython", "datasets", "decord", "deep_gemm", "flash_attn", "flash_mla", "flashinfer", "outlines", "sgl_kernel", "tilelang",
    "torch_memory_saver", "torchaudio", "torchcodec", "torchvision",
)  # fmt: skip


class Nothing:
    """Stands for any function or object of a package that is not there: it can be called, indexed and combined, and does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self  # as a decorator it leaves the function alone

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __getitem__(self, key: Any) -> Any:
        return self


class EmptyModule(types.ModuleType):
    """A module whose names are made as they are asked for: classes for capitals, otherwise `Nothing`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {}) if name[0].isupper() else Nothing()
        setattr(self, name, made)
        return made


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for each of the packages `ABSENT`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: Any) -> EmptyModule:
        module = EmptyModule(spec.name)
        module.__version__ = "0.0.0"
        return module

    def exec_module(self, module: Any) -> None:
        """There is nothing to run."""


class Fields(SimpleNamespace):
    """SGLang's description of a batch: fields that were not given are None."""

    def __getattr__(self, name: str) -> None:
        return None


def hide_absent() -> None:
    """Serve empty modules on import, but answer that the packages are not installed where a library asks."""
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in ABSENT else find_spec(name, package)
    sys.meta_path.append(Absent())


def build(heads: Path) -> Any:
    """Return SGLang's module with the weights of the folder, ready for a forward pass on a CPU."""
    import torch
    from safetensors.torch import load_file
    from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
    from sglang.test.layer_ut_utils import init_single_process_dist
    from transformers import AutoConfig

    class CausalAttention(torch.nn.Module):
        """Attention of one sequence to itself."""

        def __init__(self, served: Any) -> None:
            super().__init__()
            self.width, self.scale = served.head_dim, served.scaling

        def forward(self, query: Any, key: Any, value: Any, batch: Any = None, **further: Any) -> Any:
            q, k, v = (x.reshape(len(x), -1, self.width).transpose(0, 1)[None] for x in (query, key, value))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            return mixed[0].transpose(0, 1).flatten(1)

    init_single_process_dist()
    config = AutoConfig.from_pretrained(heads)
    kind = LlamaForCausalLMEagle3 if "LlamaForCausalLMEagle3" in config.architectures else LlamaForCausalLMEagle
    assert kind is LlamaForCausalLMEagle3 or "LlamaForCausalLMEagle" in config.architectures
    torch.manual_seed(0)
    module = kind(config).eval()
    module.load_weights(iter(load_file(heads / "model.safetensors").items()))
    for part in module.modules():
        if "_forward_method" in vars(part):
            part._forward_method = part.forward_native  # instead of a kernel that is not there
    for layer in module.model.layers:
        layer.self_attn.attn = CausalAttention(layer.self_attn.attn)
    return module


def main(heads: Path, inputs: Path, result: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    hide_absent()
    module, given = build(heads), load_file(inputs)
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = Fields(
        spec_info=SimpleNamespace(hidden_states=given["hidden_TX"]), forward_mode=ForwardMode.DECODE, contains_mm_inputs=lambda: False
    )
    module.model.embed_tokens.weight.data = given["embed_VD"]  # the target's, as the engine sets it
    with torch.no_grad():
        output = module.model(given["ids_T"], torch.arange(len(given["ids_T"])), batch)
        eagle3 = isinstance(output, tuple)
        logits_TV = output[0] @ module.lm_head.weight.T if eagle3 else output @ given["unembed_VD"].T
    tensors = {"logits_TV": logits_TV.contiguous()}
    save_file(tensors | ({"tokens_DV": module.hot_token_id.contiguous()} if eagle3 and module.hot_token_id is not None else {}), result)


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", SGLANG_USE_CPU_ENGINE="1")
    sys.path.insert(0, sys.argv[1])
    main(*map(Path, sys.argv[2:]))
