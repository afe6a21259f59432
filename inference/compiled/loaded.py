"""A program that can be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from headstart.inference.compiled.layer import Layer
from headstart.inference.compiled.program import CALL, SPACE, Program
from headstart.inference.compiled.weights import Weights


class Loaded:
    """A program with its compiled layers and its weights."""

    def __init__(self, program: Program, layers: Sequence[Layer], weights: Weights, held: Mapping[str, Tensor]) -> None:
        """``held``: the modules' weights (`named_weights`); those that are packed are in ``weights``."""
        self.program = program
        held = {**held, **weights.of(program.packed, held)}
        self._calls = [(layers[region], [held[name] for name in names]) for region, names in program.calls]
        self._held = SimpleNamespace(**held)
        space = {**SPACE, CALL: self._run}
        exec(program.text, space)   # written by `traced`
        self._forward: Any = space["forward"]

    def _run(self, number: int, inputs: list[Tensor]) -> Sequence[Tensor]:
        layer, weights = self._calls[number]
        return layer([*inputs, *weights])

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        found: Sequence[Tensor] = self._forward(self._held, *tensors)
        return found
