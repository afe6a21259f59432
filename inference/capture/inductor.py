"""Compiles a function of tensors by inductor, torch's compiler, from a trace in which sizes that change are symbols.

`torch.compile` is not used: its front end reads Python bytecode, and refuses the objects that models keep their caches in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.source import LocalSource
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from headstart.heads.backbone.tree_attention import attention_as_one_operation
from headstart.inference.capture import attention_kernel  # noqa: F401  (registers itself)
from headstart.inference.capture.bf16_products import bf16_products

CPU_OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,        # in 16 bits fused operations round as single ones do, so that every graph rounds alike
    "freezing": True,                       # weights are constants, packed for oneDNN or for bf16_products.py
    "cpp_wrapper": True,                    # no Python between the kernels
    "cpp.enable_concat_linear": True,       # queries, keys and values as one product; gate and up too
    "realize_opcount_threshold": 8,         # masks and rotations are computed once, not in every layer again
    "realize_reads_threshold": 3,
}


class CompiledGraph:
    """The compiled function. ``changing``: for each tensor, which of its sizes may differ from those it is compiled with."""

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], changing: Sequence[Sequence[bool]]
    ) -> None:
        self.shapes = ShapeEnv(duck_shape=False)   # equal sizes are not taken for the same
        mode = FakeTensorMode(shape_env=self.shapes, allow_non_fake_inputs=True)
        fakes = [_fake(mode, i, *one) for i, one in enumerate(zip(tensors, changing, strict=True))]
        on_cpu = tensors[-1].device.type == "cpu"
        with mode, attention_as_one_operation() if on_cpu else nullcontext():
            graph = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fakes)
        with torch.no_grad(), _options(graph) if on_cpu else nullcontext():
            self.run: Any = compile_fx(graph, list(fakes))
        self.guards = self.shapes.produce_guards_expression(fakes, ignore_static=False)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """True if the compiled function is right for tensors of these sizes and strides."""
        return self.guards is None or bool(self.shapes.evaluate_guards_expression(self.guards, [Layout.of(tensor) for tensor in tensors]))

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        results: Sequence[Tensor] = self.run(*tensors)
        return results


class Layout(NamedTuple):
    """Sizes and strides of a tensor, as guards ask for them; the stride of a size of 1, which says nothing, is as if there were no gaps."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        strides = list(tensor.stride())
        for dim in reversed(range(tensor.dim())):
            if tensor.shape[dim] == 1:
                strides[dim] = tensor.shape[dim + 1] * strides[dim + 1] if dim + 1 < tensor.dim() else 1
        return cls(tuple(tensor.shape), tuple(strides))

    def size(self) -> tuple[int, ...]:
        return self.sizes

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def storage_offset(self) -> int:
        """0: compiled code is given addresses."""
        return 0


@contextmanager
def _options(graph: Any) -> Iterator[None]:
    """Inductor's options for a graph on a CPU."""
    weights = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    in_bf16 = any(isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 for weight in weights)
    with config.patch(CPU_OPTIONS), bf16_products() if in_bf16 else nullcontext():
        yield


def _fake(mode: FakeTensorMode, number: int, tensor: Tensor, changing: Sequence[bool]) -> FakeTensor:
    """A tensor without data, whose changing sizes, and the strides that do not follow from its sizes, are symbols."""
    sizes = [DimDynamic.DYNAMIC if change else DimDynamic.STATIC for change in changing]
    plain = torch.empty_strided(*Layout.of(tensor), dtype=tensor.dtype, device=tensor.device)   # a view would bring its base
    return mode.from_tensor(plain, source=LocalSource(f"t{number}"), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
