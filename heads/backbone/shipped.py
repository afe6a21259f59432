"""The backbone and the heads that ship with the package."""

from __future__ import annotations

from pathlib import Path

from headstart.support.errors import UserError
from headstart.support.files import RECIPES

EMBEDDED = "embedded"
"""Name of the small backbone that ships with the package."""
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Hub id of the other model that heads ship for."""
HEADS = {EMBEDDED: "quickstart/heads/eagle3", f"{EMBEDDED}-mlp": "quickstart/heads/mlp", "smollm2": "smollm2/heads"}
"""Names of the heads that ship with the package, and their folders: two for that backbone, one for SmolLM2."""


def resolve(path: str) -> str:
    """Map ``embedded`` to the folder of the backbone that ships with the package; return anything else unchanged."""
    return str(RECIPES / "quickstart" / "backbone") if path == EMBEDDED else path


def resolve_heads(path: str) -> Path | None:
    """Return the folder of the heads of that name (`HEADS`) that ship with the package; None for other paths.

    Heads in a folder of that name come first, as they do before repositories of the hub. Raises UserError for a name like those that is
    neither one of them nor a path.
    """
    if path in HEADS and not (Path(path) / "headstart.json").is_file():
        return RECIPES / HEADS[path]
    if path.startswith(f"{EMBEDDED}-") and "/" not in path and not Path(path).exists():
        raise UserError(f"no heads {path!r} ship with the project, and there is no such folder; {', '.join(HEADS)} do")
    return None
