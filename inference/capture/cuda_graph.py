"""Backend ``cuda-graph``: one `torch.cuda.CUDAGraph` for each combination of sizes.

A graph reads and writes at the addresses it was recorded with. Stores, such as KV caches, therefore lie in fixed memory
(`headstart.heads.layers.rows`), and a graph is replayed only while they lie where they did. All other tensors are copied in at
every call, and results that are no held tensors are copied out. A graph is replayed once when it is recorded, and is not
used if its results differ from the function's by more than rounding.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.heads.layers.rows import FixedMemory, is_same_memory
from headstart.inference.capture.plugin import Backend, Call, Capture, Function, all_nearly_equal
from headstart.support.pytree import builder, flatten


class AtFixedAddresses(Backend):
    """Base of backends that replay operations at the addresses they were recorded with; subclasses record them."""

    fixed = True
    most_captures = 512

    def variant(self, call: Call) -> Hashable:
        return call.shapes

    def layout(self, call: Call) -> Hashable:
        """Address and strides of each held tensor in the memory; None for one that is copied in."""
        held = call.leaves[: call.held_leaves]
        return tuple([(leaf.data_ptr(), leaf.stride()) if self.memory.holds(leaf) else None for leaf in held])

    def capture(self, function: Function, call: Call) -> Capture:
        return Replay(self, function, call)

    def warm_up(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Do the work once, for its results: libraries choose their kernels on first use, which a recording cannot contain."""
        return work()

    @abstractmethod
    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Record the work: returns its results, and a function that does the work again at the same addresses."""


class CudaGraph(AtFixedAddresses):
    """CUDA graphs. Those of a capturer share a pool of memory: they are replayed one after another and their results are copied out."""

    name = "cuda-graph"

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None if device.type == "cuda" else f"CUDA graphs need a CUDA device; the model is on {device.type}"

    def capture(self, function: Function, call: Call) -> Capture:
        with torch.cuda.device(call.leaves[-1].device):
            return super().capture(function, call)

    @property
    def pool(self) -> Pool:
        """That of the capturer."""
        if self.memory not in _pools:
            _pools[self.memory] = Pool()
        return _pools[self.memory]

    def warm_up(self, work: Callable[[], list[Tensor]]) -> list[Tensor]:
        stream = self.pool.stream  # libraries have a workspace for each stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = work()
        torch.cuda.current_stream().wait_stream(stream)
        return results

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        pool, graph = self.pool, torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local")
        with _one_at_a_time, _same_stream(), recording:
            results = work()
        pool.graphs.add(graph)
        return results, graph.replay


class Pool:
    """The memory of a capturer's graphs, and the stream on which they are recorded."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    @property
    def handle(self) -> Any:
        """What names the memory; None if there are no graphs, with the last of which it ended: the next one begins another."""
        return next((graph.pool() for graph in self.graphs), None)


_pools: WeakKeyDictionary[FixedMemory, Pool] = WeakKeyDictionary()
"""By the capturer's memory."""
_one_at_a_time = threading.Lock()
"""Recording waits for the whole device, which is an error while another thread records."""


@contextmanager
def _same_stream() -> Iterator[None]:
    """Have the thread on its stream again in the end; `torch.cuda.graph` leaves it on another one when recording fails."""
    stream = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.set_stream(stream)


class Replay(Capture):
    """One function recorded at one combination of sizes, with stores at one place."""

    def __init__(self, backend: AtFixedAddresses, function: Function, call: Call) -> None:
        super().__init__()
        if any(leaf.device != call.leaves[-1].device for leaf in call.leaves):
            raise RuntimeError("its tensors are on several devices")
        self.backend, self.layout = backend, backend.layout(call)
        given, structure = call.leaves[: call.held_leaves], None
        self.copied = [(i, leaf.clone()) for i, leaf in enumerate(call.leaves) if not (i < len(given) and backend.memory.holds(leaf))]
        """The number of each tensor that is copied in, and where to."""
        tensors = list(call.leaves)
        for i, copy in self.copied:
            tensors[i] = copy

        def work() -> list[Tensor]:
            nonlocal structure
            results: list[Tensor] = []
            held, inputs = call.arguments(tensors)
            structure = flatten(function(held, *inputs), results)
            return results

        held = tensors[: len(given)]
        with Writes(held) as writes:
            expected = [result.clone() for result in backend.warm_up(work)]
        writes.undo()
        self.results, self.replay = backend.record(work)
        writes.undo()
        self.replay()
        if not all_nearly_equal(self.results, expected):
            raise RuntimeError("a replay gives other results")
        writes.undo()
        self.build = builder(structure)
        self.returned = [self._place_of(result, held) for result in self.results]
        self.written = [(i, copy) for i, copy in self.copied if i < len(given) and writes.into(copy)]
        """Copies of held tensors that the function writes into."""

    @staticmethod
    def _place_of(result: Tensor, held: list[Tensor]) -> int | None:
        """The number of the held tensor that a result is; None: it is a tensor of its own."""
        return next((i for i, tensor in enumerate(held) if is_same_memory(result, tensor) and result.dtype == tensor.dtype), None)

    def follows(self, call: Call) -> bool:
        return self.backend.layout(call) == self.layout

    def compare(self, function: Function, call: Call) -> None:
        """Nothing is compared: where the stores lie elsewhere, the function is recorded again."""

    def __call__(self, call: Call) -> Any:
        for i, copy in self.copied:
            copy.copy_(call.leaves[i])
        self.replay()
        for i, copy in self.written:
            call.leaves[i].copy_(copy)
        results = zip(self.results, self.returned, strict=True)
        return self.build(iter([result.clone() if place is None else call.leaves[place] for result, place in results]))


class Writes(TorchDispatchMode):
    """While it is active, the tensors that are about to be written into are copied; `undo` brings the copies back, so that running a
    function once more, as recording does, changes nothing.

    A head of two layers with a sliding window attends to slots that it then overwrites: run twice, it would read other keys.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._of: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            self._of.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self._before: dict[int, list[Tensor]] = {}
        """Copies of the tensors of each storage that was written into."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                address = value.untyped_storage().data_ptr()
                if address in self._of and address not in self._before:
                    self._before[address] = [tensor.clone() for tensor in self._of[address]]
        return func(*args, **(kwargs or {}))

    def into(self, tensor: Tensor) -> bool:
        """True if the tensor's storage was written into."""
        return tensor.untyped_storage().data_ptr() in self._before

    def undo(self) -> None:
        """Give the tensors that were written into the values they had before."""
        for address, copies in self._before.items():
            for tensor, copy in zip(self._of[address], copies, strict=True):
                tensor.copy_(copy)
