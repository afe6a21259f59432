"""Weights in 8 bits, as compressed-tensors stores them: a scale for each row.

``float-quantized``: ``NAME.weight`` in float8 and ``NAME.weight_scale``. ``pack-quantized``: ``NAME.weight_packed``, of int32 with four
values each, the first in the lowest byte and 128 added to every one, ``NAME.weight_scale`` and ``NAME.weight_shape``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from headstart.support.errors import UserError

FORMATS = ("float-quantized", "pack-quantized")
PARTS = ("_packed", "_scale", "_shape")


def require_known(config: Mapping[str, Any]) -> str | None:
    """Return how the weights are quantised; None: not at all. Raises UserError for a way that is not read here."""
    stated = config.get("quantization_config")
    if not stated:
        return None
    if stated.get("quant_method") != "compressed-tensors" or stated.get("format") not in FORMATS:
        how = f"{stated.get('quant_method')} {stated.get('format') or ''}".strip()
        raise UserError(f"the heads are quantised by {how}, which the reference engine does not read; it reads {', '.join(FORMATS)}")
    return str(stated["format"])


def whole_names(names: Collection[str]) -> set[str]:
    """Return the names of the weights, without those of their parts."""
    scaled = {name.removesuffix("_scale") for name in names if name.endswith("_scale")}
    return {name for name in names if not any(name == f"{one}{part}" for one in scaled for part in PARTS)} | scaled


def unpack(parts: Mapping[str, Tensor]) -> Tensor:
    """Return a weight ``[O, I]`` from its parts, by the ends of their names; the weight in float8 has the end ``\"\"``."""
    scale = parts["_scale"].float()
    if "_packed" not in parts:
        return parts[""].float() * scale
    bytes_4 = torch.stack([(parts["_packed"] >> shift) & 255 for shift in (0, 8, 16, 24)], -1)
    rows, columns = parts["_shape"].tolist()
    return (bytes_4.flatten(1)[:, :columns].float() - 128) * scale.reshape(rows, -1)
