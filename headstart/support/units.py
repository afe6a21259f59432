"""Quantities as text."""

from __future__ import annotations


def gigabytes(size: float) -> str:
    """Bytes as GB, or as MB below one GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
