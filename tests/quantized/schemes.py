"""Small models in the quantizations that load on a CPU, by the names of the table in docs/decode.md."""

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

Load = Callable[[Path, Path], PreTrainedModel]
"""From the folder of a model in fp32 and an empty one."""
GROUP = 128
"""Weights that share a scale."""


def save_small(folder: Path) -> None:
    """Save a small model with loud weights, so that values of 6 and more are common."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, bos_token_id=None, eos_token_id=None, pad_token_id=0, **sizes))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=2 * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def read(folder: Path, config: Any = None) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config, device_map="cpu").eval()


def int8(threshold: float) -> Load:
    return lambda folder, _: read(folder, transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold))


def nf4(folder: Path, _: Path) -> PreTrainedModel:
    return read(folder, transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32))


def torchao(name: str, granularity: str | None = None) -> Load:
    def load(folder: Path, _: Path) -> PreTrainedModel:
        from torchao import quantization

        given = {} if granularity is None else {"granularity": getattr(quantization, granularity)()}
        return read(folder, transformers.TorchAoConfig(getattr(quantization, name)(**given)))

    return load


def quanto(kind: str) -> Load:
    return lambda folder, _: read(folder, transformers.QuantoConfig(weights=kind))


def compressed(preset: str) -> Load:
    """A checkpoint of compressed-tensors, as LLM Compressor writes it, with scales of the weights' extremes."""

    def load(folder: Path, out: Path) -> PreTrainedModel:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams

        model = read(folder)
        scheme = preset_name_to_scheme(preset, ["Linear"])
        apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
        for layer in model.model.layers:
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    rows = module.weight.detach().unflatten(-1, (-1, scheme.weights.group_size or module.in_features))
                    scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), scheme.weights)
                    module.weight_scale.data.copy_(scale)
                    if "weight_zero_point" in module._parameters:
                        module.weight_zero_point.data.copy_(zero)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(out)
        compressor.update_config(out)
        return read(out)

    return load


def packed(method: str) -> Load:
    """A checkpoint of GPTQ or AWQ in 4 bits with random codes, which is all that their kernels need."""

    def load(folder: Path, out: Path) -> PreTrainedModel:
        model, tensors = read(folder), dict[str, Tensor]()
        for name, weight in model.state_dict().items():
            if "_proj" not in name:
                tensors[name] = weight
                continue
            (rows, inputs), stem = weight.shape, name.removesuffix("weight")
            shape = (inputs // 8, rows) if method == "gptq" else (inputs, rows // 8)
            tensors[stem + "qweight"] = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
            tensors[stem + "qzeros"] = torch.full((inputs // GROUP, rows // 8), 0x77777777, dtype=torch.int32)
            tensors[stem + "scales"] = (weight.unflatten(-1, (-1, GROUP)).abs().amax(-1) / 8).T.contiguous().half()
            if method == "gptq":
                tensors[stem + "g_idx"] = torch.arange(inputs, dtype=torch.int32) // GROUP
        own = {"sym": True, "desc_act": False, "checkpoint_format": "gptq"} if method == "gptq" else {"zero_point": True, "version": "gemm"}
        model.config.quantization_config = {"quant_method": method, "bits": 4, "group_size": GROUP, "backend": "torch"} | own
        model.config.save_pretrained(out)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        return read(out)

    return load


BITSANDBYTES, TORCHAO, QUANTO, COMPRESSED, GPTQ = "bitsandbytes", "torchao", "optimum-quanto", "compressed-tensors", "gptqmodel"
SCHEMES: dict[str, tuple[str, Load]] = {
    "LLM.int8, `llm_int8_threshold=6.0`": (BITSANDBYTES, int8(6.0)),
    "LLM.int8, `llm_int8_threshold=0.0`": (BITSANDBYTES, int8(0.0)),
    "NF4": (BITSANDBYTES, nf4),
    "`Int8WeightOnlyConfig`": (TORCHAO, torchao("Int8WeightOnlyConfig")),
    "`Int8DynamicActivationInt8WeightConfig`, a scale per token": (TORCHAO, torchao("Int8DynamicActivationInt8WeightConfig", "PerRow")),
    "`Int8DynamicActivationInt8WeightConfig`, `PerTensor`": (TORCHAO, torchao("Int8DynamicActivationInt8WeightConfig", "PerTensor")),
    "`Float8WeightOnlyConfig`": (TORCHAO, torchao("Float8WeightOnlyConfig")),
    "int8": (QUANTO, quanto("int8")),
    "int4": (QUANTO, quanto("int4")),
    "W8A8, a scale per token": (COMPRESSED, compressed("W8A8")),
    "W4A16": (COMPRESSED, compressed("W4A16")),
    "FP8, a scale per token": (COMPRESSED, compressed("FP8_DYNAMIC")),
} | ({"GPTQ, 4 bits": (GPTQ, packed("gptq")), "AWQ, 4 bits": (GPTQ, packed("awq"))} if find_spec(GPTQ) else {})
"""The library of each scheme, and how a model is read in it."""


def versions() -> dict[str, str]:
    return {library: version(library) for library in dict.fromkeys(library for library, _ in SCHEMES.values())}
