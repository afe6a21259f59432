"""Short names of floating-point dtypes, as recipes and flags write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Our name -> torch's."""


def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype of that short name; None for any other word (``auto``, ``no``, ``int8``)."""
    import torch  # here: recipes are read without it

    return getattr(torch, NAMES[name]) if name in NAMES else None


def dtype_name(dtype: torch.dtype) -> str:
    """The short name; torch's own for a dtype that has none."""
    name = str(dtype).removeprefix("torch.")
    return next((short for short, full in NAMES.items() if full == name), name)
