"""Backend ``compile``: functions compiled by inductor, which fuses what lies between the products. A compilation takes 10 to 45 seconds.

Sizes are constants of the compiled code except those that change between calls: from the start the slots of caches, the number of rows if
there are several, and the number of positions if there is one row; any other from the second size on, when the function is compiled again.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.heads.layers.ragged import STEP
from headstart.inference.capture.backend import Backend, Call, Capture, Flat, Function, sizes_of_one

Shapes = tuple[torch.Size, ...]


class Compile(Backend):
    """Compiled functions of modules, from their first call on; others, such as sampling noise, stay as they are."""

    name = "compile"
    slow = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: dict[Hashable, list[Shapes]] = {}
        """By structure, the shapes of the calls at which it was compiled."""

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if not torch._dynamo.is_dynamo_supported():
            return f"torch {torch.__version__} does not compile on Python {sys.version_info.major}.{sys.version_info.minor}"
        if device.type == "cpu":
            compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
            return None if shutil.which(compiler) else f"torch.compile needs a C++ compiler ({compiler} is missing); install one or set CXX"
        return None if importlib.util.find_spec("triton") else "torch.compile needs Triton on this device; install triton"

    def variant(self, call: Call) -> Hashable:
        return sizes_of_one(call.shapes), tuple([leaf.is_contiguous() for leaf in call.leaves[: call.held_leaves]])

    def capture(self, function: Function, call: Call) -> Capture:
        seen = self.seen.setdefault((call.structure, self.variant(call)), [])
        seen.append(call.shapes)
        changing = [_changing(i < call.held_leaves, _rows(call), shapes) for i, shapes in enumerate(zip(*seen, strict=True))]
        return Compiled(function, call, changing)


def _rows(call: Call) -> int:
    """The first size of the first input."""
    return next(iter(call.shapes[call.held_leaves]), 1)


def _changing(held: bool, rows: int, shapes: Sequence[torch.Size]) -> list[bool]:
    """Which sizes of a tensor change between calls: those that have, the slots of a cache ``[..., B, H, S, C]``, several rows, and
    the positions ``[1, T, ...]`` of one, in a tree mask ``[1, T, T]`` twice.

    Rows end one after another. Where there are several, indices of a symbol for the positions take inductor many minutes to simplify.
    """
    changing, sizes = [len({*sizes}) > 1 for sizes in zip(*shapes, strict=True)], shapes[-1]
    row = max(len(sizes) - 4, 0) if held else 0
    if 1 < rows == (sizes[row] if sizes else 0):
        changing[row] = True
    place = -2 if held else 1
    if len(changing) > 1 and (sizes[place] % STEP == 0 if held else sizes[0] == 1 < sizes[place]):
        changing[place] = True
        if not held and sizes[1:] == (sizes[1], sizes[1]):
            changing[2] = True
    return changing


class Compiled(Capture):
    """One compiled function. All results are its own, from the first call on: in 16 bits its rounding is not that of the function."""

    def __init__(self, function: Function, call: Call, changing: Sequence[Sequence[bool]]) -> None:
        super().__init__()
        from headstart.inference.capture.inductor import CompiledGraph  # which takes a second

        self.function = function
        flat = Flat(function, call)
        self.graph = CompiledGraph(flat, _dense(call), changing)
        self.build = flat.build
        self._layouts: set[Hashable] = set()
        """Shapes and strides of tensors that the compiled function is right for."""

    def follows(self, call: Call) -> bool:
        return self.graph.fits(_dense(call))

    def compare(self, function: Function, call: Call) -> None:
        """Nothing is compared: guards say for which sizes the compiled code is right."""

    def __call__(self, call: Call) -> Any:
        tensors = _dense(call)
        layout = tuple([(tensor.shape, tensor.stride()) for tensor in tensors[: call.held_leaves]])
        if layout not in self._layouts:
            if not self.graph.fits(tensors):
                return self.function(call.held, *call.inputs)
            self._layouts.add(layout)
        return self.build(iter(self.graph(tensors)))


def _dense(call: Call) -> list[Tensor]:
    """The tensors of the call, inputs without gaps: their strides are constants of the compiled code."""
    held = call.held_leaves
    return [*call.leaves[:held], *(leaf.contiguous() for leaf in call.leaves[held:])]
