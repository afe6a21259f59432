"""A drafter's state in decoding: a dataclass of tensors with one entry per row, which can be selected and joined by rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from headstart.support.pytree import map_tensors


def map_stores(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """Apply ``change`` to every store of a state (`RowState.stored`); other tensors are kept."""
    if isinstance(state, tuple | list):
        return type(state)(map_stores(change, part) for part in state)
    if not is_dataclass(state) or isinstance(state, type):
        return state
    stored = getattr(state, "stored", ())
    values = {one.name: getattr(state, one.name) for one in fields(state)}
    return replace(state, **{name: (map_tensors if name in stored else map_stores)(change, value) for name, value in values.items()})


def list_stores(state: Any) -> list[Tensor]:
    """List the stores of a state, in order."""
    stores: list[Tensor] = []

    def note(store: Tensor) -> Tensor:
        stores.append(store)
        return store

    map_stores(note, state)
    return stores


def drafted() -> Any:
    """Declare a field about drafted nodes: None until nodes are drafted, and reset to None by `select`, `join` and `reserve`."""
    return field(default=None, metadata={"drafted": True})


@dataclass(frozen=True)
class RowState:
    """Fields are tensors ``[B, ...]``, row states, tuples of either, or None if not set yet."""

    stored: ClassVar[tuple[str, ...]] = ()
    """Fields of stores: large tensors, written in place or not at all, which captured calls need where they were before."""

    def select(self, rows_B: Tensor) -> Self:
        """Select the rows ``rows_B`` (int64), in that order; rows may be repeated."""
        return self._with({name: _select(value, rows_B) for name, value in self._lasting().items()})

    def join(self, other: Self) -> Self:
        """Append the rows of another state."""
        return self._with({name: _join(value, getattr(other, name)) for name, value in self._lasting().items()})

    def reserve(self, length: int) -> Self:
        """Return the state with capacity for ``length`` positions per row, nodes to draft included, and without those drafted before."""
        return self._with({name: _reserve(value, length) for name, value in self._lasting().items()})

    def _lasting(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self) if "drafted" not in one.metadata}
        return {name: value for name, value in values.items() if value is not None}

    def _with(self, changes: dict[str, Any]) -> Self:
        return replace(self, **{one.name: None for one in fields(self) if "drafted" in one.metadata}, **changes)


def _select(value: Any, rows_B: Tensor) -> Any:
    if isinstance(value, tuple):
        return tuple(_select(part, rows_B) for part in value)
    return value.select(rows_B) if isinstance(value, RowState) else value[rows_B]


def _join(value: Any, other: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_join(*parts) for parts in zip(value, other, strict=True))
    return value.join(other) if isinstance(value, RowState) else torch.cat([value, other])


def _reserve(value: Any, length: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_reserve(part, length) for part in value)
    return value.reserve(length) if isinstance(value, RowState) else value
