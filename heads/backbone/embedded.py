"""The backbone and the heads that ship with the package."""

from __future__ import annotations

from pathlib import Path

from headstart.support.errors import UserError

EMBEDDED = "embedded"
"""Name of the small backbone that ships with the package."""
HEADS = {EMBEDDED: "eagle3", f"{EMBEDDED}-mlp": "mlp"}
"""Names of the heads that ship with the package, trained on that backbone, and their folders."""


def resolve(path: str) -> str:
    """Map ``embedded`` to the folder of the backbone that ships with the package; return anything else unchanged."""
    return str(_quickstart() / "backbone") if path == EMBEDDED else path


def resolve_heads(path: str) -> Path | None:
    """Return the folder of the heads of that name (`HEADS`) that ship with the package; None for other paths.

    Raises UserError for a name like those that is neither one of them nor a path.
    """
    if path not in HEADS and path.startswith(f"{EMBEDDED}-") and "/" not in path and not Path(path).exists():
        raise UserError(f"no heads {path!r} ship with the project, and there is no such folder; {', '.join(HEADS)} do")
    return _quickstart() / "heads" / HEADS[path] if path in HEADS else None


def _quickstart() -> Path:
    import headstart.recipes as recipes

    return Path(next(iter(recipes.__path__))) / "quickstart"
