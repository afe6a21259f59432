"""A stand-in for CUDA graphs on the CPU: the operations of a call are recorded once and done again at the same addresses.

Unlike a backend that runs the Python function again, it freezes whatever Python computed while recording: numbers, shapes, strides, views.
As in a graph, nothing may be read by the host or made from Python lists, and what lies in the pool that all graphs share is lost when
another graph is replayed. `benchmarks/gpu.sh` runs the real backend.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headstart.heads.kv.rows import FixedMemory, is_same_memory
from headstart.inference.capture import capture as capturing
from headstart.inference.capture.cuda_graph import AtFixedAddresses
from headstart.support.devices import AS_ACCELERATOR

FORBIDDEN = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero", "unique", "lift_fresh")
"""Operations that wait for the device, or copy more than a number from the host's memory."""


class Recording(TorchDispatchMode):
    """Notes all operations with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.new: set[int] = set()
        """Storages that were made while recording."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(FORBIDDEN) and not (name == "lift_fresh" and not args[0].dim()):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        out = func(*args, **(kwargs or {}))
        outs = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        self.operations.append((func, args, kwargs or {}, outs))
        if all(result.alias_info is None for result in func._schema.returns):
            self.new.update(one.untyped_storage().data_ptr() for one in outs)
        return out


class Recorded(AtFixedAddresses):
    """Records operations."""

    name = "cuda-graph"
    recordings: list[str] = []
    """Of all instances: the modules of the functions recorded, in order."""
    _pools: WeakKeyDictionary[FixedMemory, list[list[Tensor]]] = WeakKeyDictionary()

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return None

    def record(self, work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        with Recording() as recording:
            results = work()
        made = [one for one in results if one.untyped_storage().data_ptr() in recording.new]
        pool = self._pools.setdefault(self.memory, [])
        pool.append(made)
        spoil(made)  # recording computes nothing

        @torch.no_grad()
        def replay() -> None:
            for other in pool:
                if other is not made:
                    spoil(other)
            for func, args, kwargs, outs in recording.operations:
                new = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, Tensor)]
                for out, now in zip(outs, new, strict=True):
                    if not is_same_memory(out, now):
                        assert out.shape == now.shape, f"{func} depends on values"
                        out.copy_(now)

        return results, replay


def spoil(results: list[Tensor]) -> None:
    """Overwrite results, as another graph would."""
    for one in results:
        if 0 not in one.stride():
            one.fill_(float("nan") if one.is_floating_point() else 1)


@contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """Within this context, of this thread alone, the CPU is treated as an accelerator."""
    token = AS_ACCELERATOR.set(True)
    try:
        yield
    finally:
        AS_ACCELERATOR.reset(token)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recorded]]:
    """The stand-in in place of CUDA graphs, on a CPU that is treated as an accelerator."""
    monkeypatch.setitem(capturing.BACKENDS, "cuda-graph", lambda: Recorded)
    with cpu_as_accelerator():
        yield Recorded
