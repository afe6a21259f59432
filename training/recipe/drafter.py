"""The section of a drafter: its kind, how it starts, and its arguments, validated by its own ``Config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from headstart.support.config import RuleError, StrictModel, parse
from headstart.support.errors import UserError
from headstart.training.recipe.sections import Fraction, Text

VOCABULARY_KEY = "draft_vocab_size"


class DrafterLora(StrictModel):
    rank: PositiveInt = 16
    """Rank of the adapter's matrices."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by ``alpha / rank``."""
    dropout: Fraction = 0.0
    """Dropout before the adapter, in training."""
    target_modules: Text | list[Text] = "all-linear"
    """Layers to adapt: ``all-linear`` (but the output layers), a regular expression, or a list of module names or their endings."""
    merge: bool = False
    """Save weights with the adapter added, for serving engines; false: the unchanged weights, and the adapter beside them."""


class DrafterOptions(StrictModel):
    """Keys of every drafter beside its own arguments."""

    kind: str
    """Name of a file in heads/, or the dotted name of a module of your own."""
    init: Text | None = None
    """Folder or hub id of trained heads of this kind to start from (null: start values made from the backbone)."""
    lora: DrafterLora | None = None
    """Train low-rank adapters on the linear layers of the heads in ``init``, whose weights stay (null: train all weights)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.lora is not None and self.init is None:
            raise RuleError("lora", "adapts trained heads; set init to their folder, or lora to null", self.lora.model_dump())
        return self


def split_drafter(drafter: Mapping[str, Any], where: str = "drafter") -> tuple[DrafterOptions, dict[str, Any]]:
    """Split a drafter's section into the keys that all drafters have and the arguments of its kind. Raises UserError."""
    options = {key: drafter[key] for key in DrafterOptions.model_fields if key in drafter}
    return parse(DrafterOptions, options, where), {key: value for key, value in drafter.items() if key not in options}


def require_arguments(drafter: Mapping[str, Any], where: str) -> DrafterOptions:
    """Raise UserError unless ``kind`` names a drafter (one that ships, or a module of the user's own) and the rest are its arguments."""
    from headstart.heads.methods import find_drafter  # imports torch, which reading the other sections does without

    if "kind" not in drafter:
        raise UserError(f"missing key {where}.kind: the drafter to train, as in drafter.kind=eagle3 (or several, as heads)")
    options, arguments = split_drafter(drafter, where)
    config = find_drafter(options.kind).Config
    if VOCABULARY_KEY in arguments and VOCABULARY_KEY not in config.model_fields:
        raise UserError(f"{where}.{VOCABULARY_KEY}: {options.kind} drafts the backbone's whole vocabulary; leave it out")
    parse(config, arguments, where)
    return options
