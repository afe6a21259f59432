"""How work over many positions is cut into pieces, and how memory planning cuts it: one policy for all code that works in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ChunkPolicy:
    """The default runs every piece, of the size that suits the device the tensors are on."""

    device_type: str | None = None
    """Sizes that suit this type of device; None: the device of the tensors."""
    ends_only: bool = False
    """Run only the first two pieces and the last. The result is wrong, but its peak memory is that of all of them."""

    def select(self, pieces: list[T]) -> list[T]:
        return pieces if not self.ends_only or len(pieces) < 4 else [*pieces[:2], pieces[-1]]


_policy: ContextVar[ChunkPolicy] = ContextVar("chunk_policy")


def chunk_policy() -> ChunkPolicy:
    """The policy in force: that of the innermost `use_chunk_policy`, else the default."""
    return _policy.get(ChunkPolicy())


@contextmanager
def use_chunk_policy(policy: ChunkPolicy) -> Iterator[None]:
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)
