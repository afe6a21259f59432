"""Backend ``cuda-graph``: one `torch.cuda.CUDAGraph` for each combination of shapes. It has not been run on a GPU yet."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from headstart.inference.capture.backend import Backend, Call, Capture, Function
from headstart.inference.capture.stopwatch import void_running
from headstart.support.pytree import builder, flatten

WARM_UP = 2
"""Calls before the graph is captured: libraries choose their kernels on first use, which a graph cannot contain."""


class CudaGraph(Backend):
    """CUDA graphs: held tensors are used at their addresses, inputs are copied in, results are copied out."""

    name = "cuda-graph"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None if device.type == "cuda" else f"CUDA graphs need a CUDA device; the model is on {device.type}"

    def variant(self, call: Call) -> Hashable:
        return call.shapes

    def capture(self, function: Function, call: Call) -> Capture:
        return _Graph(function, call)


class _Graph(Capture):
    def __init__(self, function: Function, call: Call) -> None:
        super().__init__()
        self.function = function
        self._capture(call)

    def _capture(self, call: Call) -> None:
        self.addresses = _addresses(call)
        self.static = call.leaves[: call.held_leaves] + [leaf.clone() for leaf in call.leaves[call.held_leaves :]]
        held, inputs = call.arguments(self.static)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self.function(held, *inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.results: list[Tensor] = []
        with torch.cuda.graph(self.graph):
            structure = flatten(self.function(held, *inputs), self.results)
        self.build = builder(structure)

    def __call__(self, call: Call) -> Any:
        if _addresses(call) != self.addresses:   # a held tensor, such as the KV cache, was reallocated
            void_running()
            self._capture(call)
        for static, leaf in zip(self.static[call.held_leaves :], call.leaves[call.held_leaves :], strict=True):
            static.copy_(leaf)
        self.graph.replay()
        return self.build(iter([result.clone() for result in self.results]))


def _addresses(call: Call) -> list[int]:
    return [leaf.data_ptr() for leaf in call.leaves[: call.held_leaves]]
