"""The sections of drafters: kind, start, and arguments, validated by a drafter's own ``Config``; one drafter or several.

    heads:
      - {name: eagle3, kind: eagle3, depth: 5}
      - {name: medusa, kind: medusa, depth: 4, objective: {terms: {ce: 1}}, train: {lr: 3e-4}}

Each of several is trained as it would be alone, by a recipe of its own. Keys in an entry's ``objective`` and ``train`` replace the
recipe's; its other keys are the drafter's arguments. Keys that decide which tokens a step reads are shared: the drafters learn from one
forward pass of the backbone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.support.config import StrictModel, parse
from headstart.support.errors import UserError
from headstart.training.recipe.sections import Text

VOCABULARY_KEY = "draft_vocab_size"


class DrafterOptions(StrictModel):
    """Keys of every drafter beside its own arguments."""

    kind: str
    """Name of a file in heads/, or the dotted name of a module of your own."""
    init: Text | None = None
    """Folder or hub id of trained heads of this kind to start from (null: start values made from the backbone)."""


def split_drafter(drafter: Mapping[str, Any], where: str = "drafter") -> tuple[DrafterOptions, dict[str, Any]]:
    """Split a drafter's section into the keys that all drafters have and the arguments of its kind. Raises UserError."""
    options = {key: drafter[key] for key in DrafterOptions.model_fields if key in drafter}
    return parse(DrafterOptions, options, where), {key: value for key, value in drafter.items() if key not in options}


def require_arguments(drafter: Mapping[str, Any], where: str) -> None:
    """Raise UserError unless ``kind`` names a drafter (one that ships, or a module of the user's own) and the rest are its arguments."""
    from headstart.heads.methods import find_drafter  # imports torch, which reading the other sections does without

    if "kind" not in drafter:
        raise UserError(f"missing key {where}.kind: the drafter to train, as in drafter.kind=eagle3 (or several, as heads)")
    options, arguments = split_drafter(drafter, where)
    config = find_drafter(options.kind).Config
    if VOCABULARY_KEY in arguments and VOCABULARY_KEY not in config.model_fields:
        raise UserError(f"{where}.{VOCABULARY_KEY}: {options.kind} drafts the backbone's whole vocabulary; leave it out")
    parse(config, arguments, where)


SHARED_KEYS = ("steps", "epochs", "batch_size", "micro_batch", "precision")
"""Keys of ``train`` that are the same for all drafters."""
OWN_SECTIONS = ("objective", "train")
"""Sections that an entry may override."""
RESERVED_NAMES = ("state", "log.jsonl", "wandb", "tensorboard")
"""Other entries of ``save.dir``."""


def by_name(entries: Any) -> Any:
    """A list of entries as a mapping by name; anything but a list is returned as it is, for validation to judge."""
    if not isinstance(entries, list):
        return entries
    named: dict[str, Any] = {}
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise UserError(f"heads[{i}] is a mapping with kind, a name and the drafter's arguments; got {entry!r}")
        name = entry.get("name", entry.get("kind"))
        if not isinstance(name, str):
            raise UserError(f"heads[{i}].name is text; got {name!r}")
        if name in named:
            raise UserError(f"heads[{i}] is named {name!r} like another; give each a name of its own, as in {{name: {name}-2, ...}}")
        named[name] = {key: value for key, value in entry.items() if key != "name"}
    return named
