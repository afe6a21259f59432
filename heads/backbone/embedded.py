"""The backbone and the heads that ship with the package."""

from __future__ import annotations

from pathlib import Path

EMBEDDED = "embedded"
"""Name of the small backbone that ships with the package."""


def resolve(path: str) -> str:
    """Map ``embedded`` to the folder of the backbone that ships with the package; return anything else unchanged."""
    return str(_quickstart() / "backbone") if path == EMBEDDED else path


def resolve_heads() -> Path:
    """Return the folder of the heads that ship with the package, trained on the backbone ``embedded``."""
    return _quickstart() / "heads"


def _quickstart() -> Path:
    import headstart.recipes as recipes

    return Path(next(iter(recipes.__path__))) / "quickstart"
