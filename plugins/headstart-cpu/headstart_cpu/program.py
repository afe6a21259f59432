"""A pass as a program: calls of its compiled layers, and what lies between them as the Python text of the traced operations.

A program is kept as JSON beside the compiled layers, so that later processes need not trace.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headstart_cpu.kernels import OUTPUTS

SPACE: dict[str, Any] = {
    "torch": torch, "device": torch.device, "inf": float("inf"), "nan": float("nan"), "operator": operator, "NoneType": type(None),
}  # fmt: skip
"""Names that the text of a program may use."""


class NotCompiled(Exception):
    """The pass cannot be compiled; the message says why."""


@dataclass(frozen=True)
class Region:
    """A function of tensors as Python text; ``inputs``: the dtype and sizes of each, weights last."""

    text: str
    inputs: Inputs


@dataclass(frozen=True)
class Packed:
    """A tensor made of the weights ``[N, K]`` of linear layers (``transposed``: ``[K, N]``), or of their biases, by their names.

    Both begin a whole block for each layer; a layer without a bias has None.
    """

    names: tuple[str | None, ...]
    outputs: tuple[int, ...]
    transposed: bool = False
    bias: bool = False


def whole_blocks(outputs: int) -> int:
    """Round up to whole blocks of a packed weight."""
    return -(-outputs // OUTPUTS) * OUTPUTS


@dataclass(frozen=True)
class Program:
    """``inputs``: dtypes and shapes of the tensors it is called with. ``conditions``: what has to hold of their sizes.

    ``attributes``: names of the modules' weights by those that the text uses; ``packed``: attributes made of several. ``calls``: for each
    layer its region and the attributes that are its weights; the text has it as ``self.call_0`` and so on.
    """

    text: str
    inputs: Inputs
    conditions: tuple[str, ...]
    attributes: dict[str, str]
    packed: dict[str, Packed]
    regions: tuple[Region, ...]
    calls: tuple[tuple[int, tuple[str, ...]], ...]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """True if it is right for tensors of these sizes and strides."""
        sizes = sizes_named([shape for _, shape in self.inputs], tensors)
        return sizes is not None and hold(self.conditions, sizes)


def named_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def named_weights(program: Program, modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The modules' weights by the names that the program's text has for them. Raises KeyError if one is missing."""
    tensors = {f"{i}.{name}": tensor for i, module in enumerate(modules) for name, tensor in named_tensors(module)}
    return {name: tensors[there].detach() for name, there in program.attributes.items()}


# Sizes that change between calls: by names, and the conditions under which a trace is right.

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
