"""Pytrees: tuples, lists, dicts and dataclasses of tensors and constants, such as drafter states and features."""

import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from torch import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply ``change`` to every tensor of a pytree; other leaves are kept."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(change, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_tensors(change, item) for key, item in tree.items()}
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{field.name: map_tensors(change, getattr(tree, field.name)) for field in fields(tree)})
    return tree


def flatten(tree: Any, leaves: list[Tensor]) -> Any:
    """Append a pytree's tensors to ``leaves``; returns its structure, hashable if its constants are."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return Tensor
    kind = type(tree)
    if kind in (tuple, list):
        return (kind, tuple([flatten(part, leaves) for part in tree]))
    if kind is dict:
        return (kind, tuple(tree), tuple([flatten(part, leaves) for part in tree.values()]))
    if (names := _fields(cast(Hashable, kind))) is not None:
        return (kind, tuple([flatten(getattr(tree, name), leaves) for name in names]))
    return (None, tree)


@functools.cache
def _fields(kind: Hashable) -> tuple[str, ...] | None:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


def builder(structure: Any) -> Callable[[Iterator[Tensor]], Any]:
    """Return the inverse of `flatten` for pytrees of this structure."""
    if structure is Tensor:
        return next
    kind = structure[0]
    if kind is None:
        return lambda leaves: structure[1]
    parts = [builder(part) for part in structure[-1]]
    if kind is dict:
        return lambda leaves: dict(zip(structure[1], [part(leaves) for part in parts], strict=True))
    if kind in (tuple, list):
        return lambda leaves: kind([part(leaves) for part in parts])
    return lambda leaves: kind(*[part(leaves) for part in parts])


def list_tensors(tree: Any) -> list[Tensor]:
    leaves: list[Tensor] = []
    flatten(tree, leaves)
    return leaves
