"""Tensors without data to trace with, whose sizes that change are symbols."""

from __future__ import annotations

import torch
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from headstart.inference.compiled.sizes import Inputs, Shape

EXAMPLES = {"rows": 3, "nodes": 7, "stored": 11, "slots": 139, "room": 193}
"""Sizes to trace with: one number for each name, from 2 on, so that equal numbers are the same size."""
MORE = (5, 13, 17, 19, 23, 29, 31, 37, 41, 43)


class Fakes:
    """Tensors without data, of these dtypes and shapes; equal names are one symbol."""

    def __init__(self, inputs: Inputs) -> None:
        self.env = ShapeEnv(duck_shape=True)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        names = dict.fromkeys(size for _, shape in inputs for size in shape if isinstance(size, str))
        spare = iter(MORE)
        self.examples = {name: EXAMPLES.get(name) or next(spare) for name in names}
        self.tensors = [self._fake(i, dtype, shape) for i, (dtype, shape) in enumerate(inputs)]

    def _fake(self, number: int, dtype: str, shape: Shape) -> FakeTensor:
        sizes = [size if isinstance(size, int) else self.examples[size] for size in shape]
        kinds = [DimDynamic.STATIC if isinstance(size, int) else DimDynamic.DUCK for size in shape]
        plain = torch.empty(sizes, dtype=getattr(torch, dtype), device="meta")
        with torch.device("cpu"):
            like = torch.empty_strided(sizes, plain.stride(), dtype=plain.dtype)
        return self.mode.from_tensor(like, source=LocalSource(f"t{number}"), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

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
        return [
            tuple(names[str(size.node.expr)] if isinstance(size, torch.SymInt) and size.node.expr.is_symbol else int(size) for size in one.shape)
            for one in self.tensors
        ]

    def conditions(self) -> list[str]:
        """What has to hold of the sizes, as expressions of their names."""
        names = {symbol: name for symbol, name in self.names().items()}
        found = []
        for guard in self.env.guards:
            expression = self.env.simplify(guard.expr)
            symbols = {symbol: names.get(str(symbol)) for symbol in expression.free_symbols}
            if symbols and all(symbols.values()):
                found.append(str(expression.subs({symbol: type(symbol)(name, integer=True, positive=True) for symbol, name in symbols.items()})))
        return list(dict.fromkeys(found))
