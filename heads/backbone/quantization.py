"""Backbones of 8- or 4-bit weights: those a checkpoint brings, as transformers loads them, or made so while loading, by quanto.

What is exact is exact of the quantized model: heads write what it would write alone.
"""

from __future__ import annotations

import json
import zlib
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedModel, QuantoConfig

from headstart.support.errors import UserError

INTEGERS = ("int8", "int4")
"""Of linear layers but the readout; embedding and readout stay as they are, so that heads fit as before."""


def quantizing(dtype: str) -> QuantoConfig | None:
    """What `from_pretrained` needs for weights of that dtype; None: nothing. Raises UserError without the library."""
    if dtype not in INTEGERS:
        return None
    if find_spec("optimum") is None or find_spec("optimum.quanto") is None:
        raise UserError(f"dtype {dtype} needs optimum-quanto: pip install 'headstart[quantized]', or take auto, fp32, bf16 or fp16")
    return QuantoConfig(weights=dtype)


def quantization(model: PreTrainedModel) -> str:
    """Its scheme, in short, with a sum over the settings; empty for a model that has none."""
    settings: Any = model.config.to_dict().get("quantization_config")
    if not settings:
        return ""
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    return f"{method} {zlib.crc32(json.dumps(settings, sort_keys=True, default=str).encode()):08x}"
