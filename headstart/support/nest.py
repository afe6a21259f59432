"""Nests of tensors: tuples, lists, dicts and dataclasses of them, as drafter states and features are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """The same nest with every tensor changed; anything that is not a tensor stays."""
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, tuple | list):
        return type(nest)(map_tensors(change, item) for item in nest)
    if isinstance(nest, dict):
        return {key: map_tensors(change, item) for key, item in nest.items()}
    if is_dataclass(nest) and not isinstance(nest, type):
        return replace(nest, **{field.name: map_tensors(change, getattr(nest, field.name)) for field in fields(nest)})
    return nest


def list_tensors(nest: Any) -> list[Tensor]:
    """The tensors of a nest, in the order of `map_tensors`."""
    tensors: list[Tensor] = []
    map_tensors(lambda tensor: tensors.append(tensor) or tensor, nest)   # type: ignore[func-returns-value]
    return tensors
