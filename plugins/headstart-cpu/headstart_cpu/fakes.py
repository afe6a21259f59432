"""Tensors without data to trace with, whose sizes that change are symbols."""

from __future__ import annotations

from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from headstart_cpu.sizes import Inputs, Shape, Size

EXAMPLES = {"rows": 3, "nodes": 7, "stored": 11, "slots": 139, "room": 193}
"""Sizes to trace with: one number for each name, from 2 on, so that equal numbers are the same size."""


class Fakes:
    """Tensors without data, of these dtypes and shapes; equal names are one symbol."""

    def __init__(self, inputs: Inputs) -> None:
        self.env = ShapeEnv(duck_shape=True)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        names = dict.fromkeys(size for _, shape in inputs for size in shape if isinstance(size, str))
        self.examples = {name: EXAMPLES[name] for name in names}
        self.tensors = [self._fake(i, dtype, shape) for i, (dtype, shape) in enumerate(inputs)]

    def _fake(self, number: int, dtype: str, shape: Shape) -> FakeTensor:
        like = torch.empty([size if isinstance(size, int) else self.examples[size] for size in shape], dtype=getattr(torch, dtype))
        kinds = [DimDynamic.STATIC if isinstance(size, int) else DimDynamic.DUCK for size in shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        return self.mode.from_tensor(like, source=LocalSource(f"t{number}"), symbolic_context=context)

    def names(self) -> dict[str, str]:
        """The name of every symbol."""
        of: dict[str, str] = {}
        for tensor in self.tensors:
            for size in tensor.shape:
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    hint = size.node.hint
                    of[str(size.node.expr)] = next(name for name, example in self.examples.items() if example == hint)
        return of

    def sizes(self) -> list[Shape]:
        """The shapes as they are after tracing: two sizes that had to be equal have one name, one that had to be a number is that."""
        names = self.names()

        def named(size: Any) -> Size:
            return names[str(size.node.expr)] if isinstance(size, torch.SymInt) and size.node.expr.is_symbol else int(size)

        return [tuple(map(named, tensor.shape)) for tensor in self.tensors]

    def conditions(self) -> list[str]:
        """What has to hold of the sizes, as expressions of their names."""
        names, found = self.names(), []
        for guard in self.env.guards:
            condition = self.env.simplify(guard.expr)
            symbols = {symbol: names.get(str(symbol)) for symbol in condition.free_symbols}
            if symbols and all(symbols.values()):
                found.append(str(condition.subs({symbol: sympy.Symbol(str(name), positive=True) for symbol, name in symbols.items()})))
        return list(dict.fromkeys(found))
