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
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.layers.rows import FixedMemory, is_same_memory
from headstart.inference.capture import capture as capturing
from headstart.inference.capture.cuda_graph import AtFixedAddresses
from headstart.inference.capture.plugin import Backend, Call, Capture, Function
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


# Capture backends that change what a captured forward pass computes, to see that it is noticed.

Change = Callable[[Call, Tensor], None]
"""Changes the logits ``[B, N, V]`` of a pass over trees, or a tensor of the call that it wrote into."""


def a_logit(call: Call, logits_BNV: Tensor) -> None:
    """One logit after the root is 20 larger."""
    logits_BNV[0, 0, 5] += 20


def a_value(call: Call, logits_BNV: Tensor) -> None:
    """One number of the values in the cache is another one: of the second layer's fourth token."""
    _, values = call.held[0]
    values[0][1, 0, 0, 3, 1] = 3000


def last_places(call: Call, logits_BNV: Tensor) -> None:
    """Every logit moves by a unit in the last place, up, down or not at all."""
    signs = torch.randint(-1, 2, logits_BNV.shape)
    logits_BNV += logits_BNV.abs() * torch.finfo(logits_BNV.dtype).eps * signs


def register(monkeypatch: pytest.MonkeyPatch, change: Change | None) -> None:
    """Have the backend ``cuda-graph`` run functions as they are and change the result of each pass over trees."""

    class Changed(Backend):
        name = "cuda-graph"

        @classmethod
        def unavailable(cls, device: torch.device) -> str | None:
            return None

        def variant(self, call: Call) -> Any:
            return call.shapes

        def capture(self, function: Function, call: Call) -> Capture:
            return Changing(function)

    class Changing(Capture):
        def __init__(self, function: Function) -> None:
            super().__init__()
            self.function = function

        def __call__(self, call: Call) -> Any:
            result = self.function(call.held, *call.inputs)
            if change is not None and isinstance(result, tuple) and len(result) == 3 and call.held is not None:  # a pass over trees
                change(call, result[1])
            return result

    monkeypatch.setitem(capturing.BACKENDS, "cuda-graph", lambda: Changed)


def like_smollm2(dtype: torch.dtype, twins: bool = False) -> Backbone:
    """A random model of SmolLM2-135M's widths with two layers and 4,096 tokens; with ``twins``, every two tokens have equal logits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9, num_key_value_heads=3,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, initializer_range=0.05, max_position_embeddings=512,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if twins:
        with torch.no_grad():
            model.lm_head.weight[1::2] = model.lm_head.weight[::2]
    return Backbone(model.to(dtype))
