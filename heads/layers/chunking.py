"""One policy for all code that computes in chunks; memory planning overrides it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class ChunkPolicy:
    """Chunk sizes and which chunks to run. The default runs all, sized for the tensors' device."""

    device_type: str | None = None
    """Device type to size chunks for; None: that of the tensors."""
    ends_only: bool = False
    """Run only the first two chunks and the last: results are wrong, but peak memory is that of a full run."""

    def select(self, pieces: list[T]) -> list[T]:
        return pieces if not self.ends_only or len(pieces) < 4 else [*pieces[:2], pieces[-1]]


_policy: ContextVar[ChunkPolicy] = ContextVar("chunk_policy")


def chunk_policy() -> ChunkPolicy:
    """Return the policy of the innermost `use_chunk_policy`, or the default."""
    return _policy.get(ChunkPolicy())


@contextmanager
def use_chunk_policy(policy: ChunkPolicy) -> Iterator[None]:
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)
