"""Files that ship with the package: recipes and the prompts of the quickstart."""

from __future__ import annotations

from pathlib import Path

from headstart.support.files import as_path

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
"""The folder of recipes: that of the clone, or of the installed package."""


def local_or_shipped(path: str | Path) -> Path:
    """Return the path; where nothing is there and it begins with ``recipes/``, the shipped file of that name if there is one.

    So `recipes/quickstart/eagle3.yaml` names the same file in a clone and, after `pip install`, in any folder. Raises UserError for a path
    that no file can have.
    """
    given = as_path("file", path)
    parts = given.parts
    if not given.exists() and len(parts) > 1 and parts[0] == "recipes" and ".." not in parts:
        shipped = RECIPES.joinpath(*parts[1:])
        if shipped.is_file():
            return shipped
    return given
