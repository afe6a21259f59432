"""``headstart inspect`` for a recipe or a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from headstart.heads.checkpoint import METADATA
from headstart.support.errors import UserError
from headstart.support.files import settle
from headstart.support.hub import local_or_shipped
from headstart.support.terminal import labelled
from headstart.training.inspect.checkpoint import inspect_checkpoint
from headstart.training.inspect.recipe import inspect_recipe
from headstart.training.recipe.extends import read_extended
from headstart.training.recipe.recipe import load_recipe


def inspect(target: str, overrides: Sequence[str], row: int, marks: bool) -> tuple[dict[str, Any], list[RenderableType]]:
    """Return the report for ``--json`` and the output to print; ``marks``: mark label tokens with brackets instead of colours.

    Raises UserError if the target is neither a recipe nor a checkpoint.
    """
    path = local_or_shipped(target)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        report, screen = inspect_recipe(load_recipe(target, overrides), row, marks)
        extended = [str(file) for file in read_extended(local_or_shipped(path))[1]]
        shown: list[RenderableType] = [labelled([("extends", ", ".join(extended))]), ""] if extended else []
        return {"extends": extended, **report}, [*shown, *screen]
    settle(path)
    if path.is_dir() and not (path / METADATA).is_file():
        raise UserError(
            f"{target} is a folder without {METADATA}: neither a recipe nor trained heads; give a recipe (.yaml), or a folder that "
            "training has saved heads in (save.dir)"
        )
    if overrides:
        raise UserError(f"{target} is taken for trained heads, which take no overrides ({overrides[0]}); a recipe ends in .yaml")
    return inspect_checkpoint(target)
