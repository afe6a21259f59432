"""Backend ``cuda-graph``: one `torch.cuda.CUDAGraph` for each combination of shapes.

A graph reads and writes at the addresses it was captured with. Held tensors are therefore moved to memory at fixed addresses
(`FixedMemory`), once: results that are held tensors are returned there, and the next call finds them in place. Inputs are copied in at
every call, other results are copied out.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from headstart.inference.capture.backend import Backend, Call, Capture, Function
from headstart.inference.capture.fixed_memory import Writes, is_same_memory
from headstart.inference.capture.stopwatch import void_running
from headstart.support.pytree import builder, flatten, list_tensors


class AtFixedAddresses(Backend):
    """Base of backends that replay operations at the addresses they were recorded with; subclasses record them."""

    def variant(self, call: Call) -> Hashable:
        return call.shapes

    def capture(self, function: Function, call: Call) -> Capture:
        return Replay(self, function, call)

    def settle(self, held: Any) -> Any:
        return builder(flatten(held, []))(iter(self.memory.place(list_tensors(held))))

    @abstractmethod
    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Record the work: returns its results, and a function that does the work again at the same addresses."""


class CudaGraph(AtFixedAddresses):
    """CUDA graphs, all in one pool of memory: they are replayed one after another and their results are copied out."""

    name = "cuda-graph"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None if device.type == "cuda" else f"CUDA graphs need a CUDA device; the model is on {device.type}"

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()   # libraries choose their kernels on first use, which a graph cannot contain
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_pool()):
            results = work()
        return results, graph.replay


@functools.cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()


class Replay(Capture):
    """One function recorded at one combination of shapes."""

    def __init__(self, backend: AtFixedAddresses, function: Function, call: Call) -> None:
        super().__init__()
        self.backend, self.function = backend, function
        self._record(call)

    def _record(self, call: Call) -> None:
        if any(leaf.device != call.leaves[-1].device for leaf in call.leaves):
            raise RuntimeError("its tensors are on several devices")
        self.held = self.backend.memory.place(call.leaves[: call.held_leaves])
        self.inputs = [leaf.clone() for leaf in call.leaves[call.held_leaves :]]
        structure: Any = None

        def work() -> list[Tensor]:
            nonlocal structure
            results: list[Tensor] = []
            held, inputs = call.arguments([*self.held, *self.inputs])
            structure = flatten(self.function(held, *inputs), results)
            return results

        with Writes() as writes:
            work()
        self.written = [writes.into(tensor) for tensor in self.held]
        self.results, self.replay = self.backend.record(work)
        self.build = builder(structure)
        self.returned = [self._place_of(result) for result in self.results]

    def _place_of(self, result: Tensor) -> int | None:
        """The number of the held tensor that a result is; None: it is a tensor of its own."""
        return next((i for i, tensor in enumerate(self.held) if is_same_memory(result, tensor) and result.dtype == tensor.dtype), None)

    def __call__(self, call: Call) -> Any:
        given = call.leaves[: call.held_leaves]
        held = self.backend.memory.place(given)
        if not all(is_same_memory(*pair) for pair in zip(held, self.held, strict=True)):   # the memory of one has grown
            void_running()
            self._record(call)
            held = self.held
        for static, leaf in zip(self.inputs, call.leaves[call.held_leaves :], strict=True):
            static.copy_(leaf)
        self.replay()
        for tensor, home, written in zip(given, held, self.written, strict=True):
            if written and not is_same_memory(tensor, home):
                tensor.copy_(home)
        results = zip(self.results, self.returned, strict=True)
        return self.build(iter([result.clone() if place is None else held[place] for result, place in results]))
