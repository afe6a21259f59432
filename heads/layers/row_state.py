"""A drafter's state in decoding: a dataclass of tensors with one entry per row, which can be selected and joined by rows."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


def drafted() -> Any:
    """Declare a field about drafted nodes: None until nodes are drafted, and reset to None by `select` and `join`."""
    return field(default=None, metadata={"drafted": True})


@dataclass(frozen=True)
class RowState:
    """Fields are tensors ``[B, ...]``, nested row states, or None if not set yet."""

    def select(self, rows_B: Tensor) -> Self:
        """Select the rows ``rows_B`` (int64), in that order; rows may be repeated."""
        changes: dict[str, Any] = {}
        for name, value in self._lasting().items():
            changes[name] = value.select(rows_B) if isinstance(value, RowState) else value[rows_B]
        return self._with(changes)

    def join(self, other: Self) -> Self:
        """Append the rows of another state."""
        changes: dict[str, Any] = {}
        for name, value in self._lasting().items():
            theirs = getattr(other, name)
            changes[name] = value.join(theirs) if isinstance(value, RowState) else torch.cat([value, theirs])
        return self._with(changes)

    def reserve(self, length: int) -> Self:
        """Return the state with capacity for ``length`` positions per row, drafted nodes included."""
        parts = {one.name: getattr(self, one.name) for one in fields(self)}
        return replace(self, **{name: part.reserve(length) for name, part in parts.items() if isinstance(part, RowState)})

    def _lasting(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self) if "drafted" not in one.metadata}
        return {name: value for name, value in values.items() if value is not None}

    def _with(self, changes: dict[str, Any]) -> Self:
        return replace(self, **{one.name: None for one in fields(self) if "drafted" in one.metadata}, **changes)
