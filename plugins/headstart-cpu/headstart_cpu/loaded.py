"""A program that can be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from headstart_cpu.layer import Layer
from headstart_cpu.program import SPACE, Program
from headstart_cpu.weights import Weights


class Loaded:
    """A program with its compiled layers and its weights."""

    def __init__(self, program: Program, layers: Sequence[Layer], weights: Weights, held: Mapping[str, Tensor]) -> None:
        """``held``: the modules' weights (`named_weights`); those that are packed are in ``weights``."""
        self.program = program
        held = {**held, **weights.of(program.packed, held)}
        calls = ((layers[region], [held[name] for name in names]) for region, names in program.calls)
        self._held = SimpleNamespace(**held, **{f"call_{number}": partial(_run, *call) for number, call in enumerate(calls)})
        space = dict(SPACE)
        exec(program.text, space)  # written by `traced`
        self._forward: Any = space["forward"]

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._forward(self._held, *tensors)
        return found


def _run(layer: Layer, weights: list[Tensor], inputs: list[Tensor]) -> Sequence[Tensor]:
    return layer([*inputs, *weights])
