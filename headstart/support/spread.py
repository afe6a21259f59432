"""Whole numbers at equal distances, exact at any size: in fp32, as of `torch.linspace`, numbers above 2^24 are no longer told apart."""

from __future__ import annotations


def spread(first: int, last: int, count: int) -> list[int]:
    """Return ``count`` numbers from ``first`` to ``last``, both among them unless ``count`` is 1, rounded down."""
    return [first + i * (last - first) // max(count - 1, 1) for i in range(count)]
