"""Format quantities."""

from __future__ import annotations


def gigabytes(size: float) -> str:
    """Format bytes as GB, or as MB below 1 GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
