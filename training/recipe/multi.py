"""Several heads by one recipe: ``heads`` in place of ``drafter``; each is trained as it would be alone, by a recipe of its own.

    heads:
      - {name: eagle3, kind: eagle3, depth: 5}
      - {name: medusa, kind: medusa, depth: 4, objective: {terms: {ce: 1}}, train: {lr: 3e-4}}

What an entry says in ``objective`` and ``train`` replaces what the recipe says there; the rest are the drafter's own arguments.
What decides which tokens a step reads is shared: the heads learn from one reading of the backbone.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.training.recipe import strict
from headstart.training.recipe.strict import RecipeError

if TYPE_CHECKING:
    from headstart.training.recipe.recipe import Recipe

SHARED = ("steps", "epochs", "batch_size", "micro_batch", "precision")
"""Keys of ``train`` that are the same for all heads."""
OWN = ("objective", "train")
"""Sections of a recipe of which an entry may have its own keys."""
TAKEN = ("state", "log.jsonl", "report.html", "wandb", "tensorboard")
"""What lies in ``save.dir`` beside the heads."""


def by_name(entries: Any) -> Any:
    """A list of heads as the mapping from names that a recipe holds; what is no list is left to be judged there."""
    if not isinstance(entries, list):
        return entries
    named: dict[str, Any] = {}
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise RecipeError(f"heads[{i}] is a mapping with kind, a name and the drafter's arguments; got {entry!r}")
        name = entry.get("name", entry.get("kind"))
        if not isinstance(name, str):
            raise RecipeError(f"heads[{i}].name is text; got {name!r}")
        if name in named:
            raise RecipeError(f"heads[{i}] is named {name!r} like another; give each a name of its own, as in {{name: {name}-2, ...}}")
        named[name] = {key: value for key, value in entry.items() if key != "name"}
    return named


def apart(recipe: Recipe) -> dict[str, Recipe]:
    """For each head the recipe that trains it alone, to the same weights, into its own folder; the only one's name is empty.

    Raises RecipeError for an entry that is none.
    """
    return {name: _alone(recipe, name, entry) for name, entry in recipe.heads.items()} if recipe.heads else {"": recipe}


def _alone(recipe: Recipe, name: str, entry: dict[str, Any]) -> Recipe:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name in TAKEN:
        raise RecipeError(f"heads: {name!r} cannot name a folder in save.dir; use letters, digits, '-', '_' and '.'")
    for key in OWN:
        if not isinstance(entry.get(key, {}), dict):
            raise RecipeError(f"heads.{name}.{key} is a section with keys of its own; got {entry[key]!r}")
    for key in SHARED:
        if key in entry.get("train", {}):
            raise RecipeError(f"heads.{name}.train.{key} is the same for all heads, which learn from one reading; set train.{key}")
    try:
        return replace(
            recipe,
            heads={},
            drafter={key: value for key, value in entry.items() if key not in OWN},
            objective=_changed(recipe.objective, entry.get("objective", {}), "objective."),
            train=_changed(recipe.train, entry.get("train", {}), "train."),
            save=replace(recipe.save, dir=str(Path(recipe.save.dir) / name)),
        )
    except RecipeError as error:
        raise RecipeError(f"heads.{name}: {error}") from None


def _changed(section: Any, changes: dict[str, Any], at: str) -> Any:
    return strict.build(type(section), {**strict.to_dict(section), **changes}, at) if changes else section
