"""Count peak memory exactly: bytes of tensor storages as they are allocated and freed, by part of the step.

Works on fake tensors (training/plan/fake_model.py) and on real ones.

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
    """Unique number; addresses are reused."""
    part: str
    size: int


class MemoryCounter(TorchDispatchMode):
    """Tracks the storages allocated since it was entered and not freed, and those live at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.part = ""
        """Part of new storages."""
        self.rows: int | None = None
        """B: if set, tensors with a head dimension (``[B, H, ...]``, ``[B H, ...]``) belong to the part *attention*."""
        self.live: dict[int, _Made] = {}
        self.at_peak: list[_Made] = []
        self.bytes = self.peak = self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self.live:
                    self.live[storage._cdata] = _Made(self.count, self._part(leaf), storage.nbytes())
                    self.count, self.bytes = self.count + 1, self.bytes + storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata)
        if self.bytes > self.peak:
            self.peak, self.at_peak = self.bytes, list(self.live.values())
        return out

    def _part(self, made: Tensor) -> str:
        by_heads = self.rows is not None and (made.ndim > 3 or (made.ndim == 3 and made.shape[0] != self.rows))
        return "attention" if by_heads else self.part

    def _freed(self, key: int) -> None:
        self.bytes -= self.live.pop(key).size

    def reset_peak(self) -> None:
        """Restart the peak from the current state."""
        self.peak, self.at_peak = self.bytes, list(self.live.values())

    def rename(self, tensors: list[Tensor], part: str) -> None:
        """Move the tensors to another part."""
        for key in {tensor.untyped_storage()._cdata for tensor in tensors} & self.live.keys():
            self.live[key] = self.live[key]._replace(part=part)

    def parts(self, gradients: list[Tensor]) -> Parts:
        """Return the bytes by part at the peak; ``gradients``, which must be live, are a separate part."""
        keys = {tensor.untyped_storage()._cdata for tensor in gradients} & self.live.keys()
        numbers, bytes_of = {self.live[key].number for key in keys}, Counter[str]()
        for made in self.at_peak:
            bytes_of["gradients" if made.number in numbers else made.part] += made.size
        return dict(bytes_of)
