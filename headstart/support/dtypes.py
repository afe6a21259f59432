"""Short names of floating-point dtypes, as used in recipes and flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short name -> torch's name."""


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the dtype of a short name; None for any other value (``auto``, ``no``, ``int8``)."""
    import torch  # here, so that recipes load without torch

    return getattr(torch, NAMES[name]) if name in NAMES else None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, or torch's if it has none."""
    name = str(dtype).removeprefix("torch.")
    return next((short for short, full in NAMES.items() if full == name), name)


def bf16_instructions() -> bool:
    """True if the CPU multiplies bf16 numbers itself (x86 with AVX-512 BF16 or AMX)."""
    import torch

    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
