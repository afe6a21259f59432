"""The dtype of a backbone's weights, 8 and 4 bits included: quantized checkpoints, or weights that quanto quantizes on loading.

Decoding is lossless with respect to the model in that dtype.
"""

from __future__ import annotations

import json
import zlib
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel, QuantoConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from headstart.support.devices import bf16_instructions, torch_dtype
from headstart.support.errors import UserError

INTEGERS = ("int8", "int4")
"""Weight dtypes of the linear layers; the embedding and output layer stay unquantized, so that the same heads fit."""


def loaded_dtype(dtype: str, config: PretrainedConfig, device: torch.device) -> torch.dtype | str:
    """Return the argument ``dtype`` of `from_pretrained`.

    ``auto``: the checkpoint's own dtype on an accelerator; on a CPU bf16 if the checkpoint is in bf16 and the CPU has instructions for it,
    else fp32. int8, int4: what is not quantized is as with ``auto`` on an accelerator, in fp32 on a CPU.
    """
    if (named := torch_dtype(dtype)) is not None:
        return named
    if device.type != "cpu":
        return "auto"
    saved = config.get_text_config().dtype
    return torch.bfloat16 if dtype == "auto" and saved == torch.bfloat16 and bf16_instructions() else torch.float32


def quantizing(dtype: str, gguf: bool) -> QuantizationConfigMixin | None:
    """Return the ``quantization_config`` for `from_pretrained`, if any. Raises UserError if optimum-quanto is not installed.

    ``gguf``: the weights are those of a GGUF file, which are dequantized; UserError for integers.
    """
    if dtype not in INTEGERS:
        return _dequantizing() if gguf else None
    if gguf:
        raise UserError(f"dtype {dtype} quantizes safetensors, and this is a GGUF file: take auto, fp32, bf16 or fp16")
    if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
        raise UserError(f"dtype {dtype} needs optimum-quanto: pip install 'headstart[quantized]', or take auto, fp32, bf16 or fp16")
    return QuantoConfig(weights=dtype)


def _dequantizing() -> QuantizationConfigMixin:
    try:
        from transformers import GgufConfig
    except ImportError:
        raise UserError(f"transformers {transformers.__version__} is too old for GGUF files; 5.23 reads them") from None
    return GgufConfig(dequantize=True)


def quantization(model: PreTrainedModel) -> str:
    """Return a model's quantization method and a checksum of its settings; empty if it is not quantized."""
    settings: Any = model.config.to_dict().get("quantization_config")
    if not settings:
        return ""
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    return f"{method} {zlib.crc32(json.dumps(settings, sort_keys=True, default=str).encode()):08x}"
