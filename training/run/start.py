"""How new drafters start: trained heads (``drafter.init``) and draft vocabularies."""

from __future__ import annotations

from collections.abc import Mapping

from headstart.heads.base import Drafter
from headstart.heads.warm_start import WarmStart, read_warm_start
from headstart.training.data.vocabulary import LabelCounts, most_frequent
from headstart.training.recipe.drafter import split_drafter
from headstart.training.recipe.recipe import Recipe


def read_starts(recipe: Recipe, drafters: Mapping[str, Drafter]) -> dict[str, WarmStart]:
    """Read the trained heads of all drafters that have ``init``. Raises UserError if they do not fit."""
    starts: dict[str, WarmStart] = {}
    for name, one in recipe.per_drafter().items():
        options = split_drafter(one.drafter)[0]
        if options.init is not None:
            starts[name] = read_warm_start(options.init, options.kind, drafters[name].backbone)
            starts[name].require_fits(drafters[name])
    return starts


def choose_vocabularies(drafters: Mapping[str, Drafter], starts: Mapping[str, WarmStart], counts: LabelCounts) -> None:
    """Set the draft vocabularies to the most frequent tokens of the training data; an adapted drafter keeps its own."""
    for name, drafter in drafters.items():
        if drafter.vocabulary is None:
            continue
        tokens = starts[name].drafter.vocabulary if drafter.lora is not None else None
        drafter.use_vocabulary(most_frequent(counts.training_V, len(drafter.vocabulary)) if tokens is None else tokens)
