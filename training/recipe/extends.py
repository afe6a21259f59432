"""Recipes that extend others.

    extends: ../shared/ultrachat.yaml                       # or a list; later files replace keys of earlier ones
    drafter: {kind: eagle3, depth: 7}

The paths are relative to the file that names them. Sections are merged key by key; any other value, null included, replaces the extended
one, and the recipe's own keys come last. An extended file may be a part of a recipe, such as a data section, and may extend others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.support.errors import UserError
from headstart.support.files import as_path
from headstart.training.recipe.drafter import by_name
from headstart.training.recipe.yaml_text import read_yaml

KEY = "extends"
MAX_FILES = 100
"""Files that one recipe may extend, directly or not, a file that several extend counted for each."""


def read_extended(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """Return the keys of a recipe file with those it extends, and the extended files in the order in which they were applied.

    Raises UserError for a file that is missing, is not a recipe, or extends itself.
    """
    extended: list[Path] = []
    return _read(path, (), extended), extended


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``under`` with the values of ``over``; mappings in both are merged in turn."""
    result = dict(under)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _read(path: Path, above: Sequence[Path], extended: list[Path]) -> dict[str, Any]:
    tree = read_yaml(path)
    names = tree.pop(KEY, None)
    if "heads" in tree:
        tree["heads"] = by_name(tree["heads"] or {})
    result: dict[str, Any] = {}
    for name in _names(names):
        file = path.parent / as_path("extends:", name)
        if not file.is_file():
            raise UserError(f"extends: no file {name!r}; its path is relative to {path.parent}, where {path.name} is")
        if len(extended) > MAX_FILES:
            raise UserError(f"extends: more than {MAX_FILES} files are read for one recipe; let it extend fewer")
        if file.resolve() in {one.resolve() for one in (*above, path)}:
            chain = " -> ".join(str(one) for one in (*above, path, file))
            raise UserError(f"extends: {name!r} leads back to a file that extends it ({chain}); take one of these lines out")
        result = merged(result, _read(file, (*above, path), extended))
        extended.append(file)
    return merged(result, tree)


def _names(value: Any) -> list[str]:
    names = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) and name for name in names):
        raise UserError(f"extends is the path of a recipe, or a list of paths; got {value!r}")
    return names
