"""Sizes that change between calls: by names, and the conditions under which a trace is right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

Size = int | str
"""A number, or the name of a size that changes between calls."""
Shape = tuple[Size, ...]
Inputs = tuple[tuple[str, Shape], ...]
"""The dtype and shape of every input."""
FUNCTIONS = {
    "Eq": lambda a, b: a == b, "Ne": lambda a, b: a != b, "Mod": lambda a, b: a % b, "FloorDiv": lambda a, b: a // b,
    "Max": max, "Min": min, "And": lambda *a: all(a), "Or": lambda *a: any(a),
    "Not": lambda a: not a, "floor": math.floor, "ceiling": math.ceil,
    "CleanDiv": lambda a, b: a // b, "PythonMod": lambda a, b: a % b,
}  # fmt: skip


def sizes_named(shapes: Sequence[Shape], tensors: Sequence[Tensor]) -> dict[str, int] | None:
    """The size of every name, if the tensors have these shapes and are without gaps; else None."""
    sizes: dict[str, int] = {}
    for shape, tensor in zip(shapes, tensors, strict=True):
        if len(shape) != tensor.dim() or not tensor.is_contiguous():
            return None
        for size, there in zip(shape, tensor.shape, strict=True):
            if (there != size) if isinstance(size, int) else (sizes.setdefault(size, there) != there or not there):
                return None
    return sizes


def hold(conditions: Sequence[Any], sizes: Mapping[str, int]) -> bool:
    """True if the conditions hold of these sizes. A size of 1 counts as 2: traces tell them apart for the sake of broadcasting alone."""
    space = {**FUNCTIONS, **{name: max(size, 2) for name, size in sizes.items()}}
    return all(eval(condition, {"__builtins__": {}}, space) for condition in conditions)
