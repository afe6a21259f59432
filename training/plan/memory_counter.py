"""Memory counted, not sampled: bytes of tensors as they are made and freed, by the part they are made for.

Works on tensors without numbers (training/plan/sketch.py) as on real ones.

Shape suffixes: B batch, H heads, T positions, D width.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Parts = dict[str, int]
"""Name of a part -> bytes."""


class _Made(NamedTuple):
    number: int
    """Addresses are used again, numbers are not."""
    part: str
    size: int


class Live(TorchDispatchMode):
    """The storages made since it was entered and not yet freed; and what there was when they were most."""

    def __init__(self) -> None:
        super().__init__()
        self.part = ""
        """What is made from here on is of this part."""
        self.rows: int | None = None
        """B, where what is laid out by heads (``[B, H, ...]``, ``[B H, ...]``) is a part of its own, *attention*."""
        self.there: dict[int, _Made] = {}
        self.then: list[_Made] = []
        self.now = self.most = self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self.there:
                    self.there[storage._cdata] = _Made(self.count, self._part(leaf), storage.nbytes())
                    self.count, self.now = self.count + 1, self.now + storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
        if self.now > self.most:
            self.most, self.then = self.now, list(self.there.values())
        return out

    def _part(self, made: Tensor) -> str:
        by_heads = self.rows is not None and (made.ndim > 3 or (made.ndim == 3 and made.shape[0] != self.rows))
        return "attention" if by_heads else self.part

    def _freed(self, key: int) -> None:
        self.now -= self.there.pop(key).size

    def again(self) -> None:
        """Look for the most from here on."""
        self.most, self.then = self.now, list(self.there.values())

    def rename(self, tensors: list[Tensor], part: str) -> None:
        """Those tensors are of another part from here on."""
        for key in {tensor.untyped_storage()._cdata for tensor in tensors} & self.there.keys():
            self.there[key] = self.there[key]._replace(part=part)

    def parts(self, gradients: list[Tensor]) -> Parts:
        """When they were most; ``gradients``, now there, are a part of their own."""
        keys = {tensor.untyped_storage()._cdata for tensor in gradients} & self.there.keys()
        numbers, found = {self.there[key].number for key in keys}, Counter[str]()
        for made in self.then:
            found["gradients" if made.number in numbers else made.part] += made.size
        return dict(found)
