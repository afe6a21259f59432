"""How new drafters start: trained heads (``drafter.init``), draft vocabularies, and values fitted to the training text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from accelerate import Accelerator

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import read_metadata, require_sizes
from headstart.heads.warm_start import WarmStart, read_warm_start, require_kind
from headstart.support.errors import UserError
from headstart.support.terminal import progress
from headstart.training.data.batches import FORWARD_TOKENS, batches_by_length, collate
from headstart.training.data.data import LabelCounts, most_frequent
from headstart.training.data.sample import Sample
from headstart.training.features.source import FeatureSource
from headstart.training.features.supplement import chosen_texts
from headstart.training.recipe.recipe import Recipe, split_drafter
from headstart.training.run.sharding import is_sharded

CPU_POSITIONS = 1024
"""Positions of a forward pass on a CPU, where more bring no speed and would show progress seldom."""


def require_starts(recipe: Recipe) -> Recipe:
    """Return the recipe; raise UserError if a drafter's ``init`` is missing, of another kind, or of a backbone of other sizes."""
    for one in recipe.per_drafter().values():
        options = split_drafter(one.drafter)[0]
        if options.init is not None:
            try:
                require_kind(options.init, read_metadata(options.init)[1], options.kind)
                require_sizes(options.init, recipe.backbone.path, trust_remote_code=recipe.backbone.trust_remote_code)
            except UserError as error:
                raise UserError(f"drafter.init: {error}") from None
    return recipe


def read_starts(recipe: Recipe, drafters: Mapping[str, Drafter]) -> dict[str, WarmStart]:
    """Read the trained heads of all drafters that have ``init``. Raises UserError if they do not fit."""
    starts: dict[str, WarmStart] = {}
    for name, one in recipe.per_drafter().items():
        options = split_drafter(one.drafter)[0]
        if options.init is not None:
            starts[name] = read_warm_start(options.init, options.kind, drafters[name].backbone)
            starts[name].require_fits(drafters[name])
    return starts


def choose_vocabularies(drafters: Mapping[str, Drafter], counts: LabelCounts) -> None:
    """Set the draft vocabularies to the most frequent tokens of the training data."""
    for drafter in drafters.values():
        if drafter.vocabulary is not None:
            drafter.use_vocabulary(most_frequent(counts.training_V, len(drafter.vocabulary)))


def fit_starts(drafters: Sequence[Drafter], samples: Sequence[Sample], features: FeatureSource, accelerator: Accelerator) -> list[str]:
    """Let new drafters fit their start values to texts of the training data; returns lines for the log, in the main process.

    The main process does so for all; with a sharded backbone, all read the texts together.
    """
    lines: list[str] = []
    fresh = [drafter for drafter in drafters if drafter.start_positions]
    if fresh and (accelerator.is_main_process or is_sharded(fresh[0].backbone)):
        for drafter in fresh:
            source = features.for_starts(drafter.taps)
            lines.append(drafter.fit_start(_features(drafter, samples, source, accelerator.is_main_process)))
    if accelerator.num_processes > 1:
        for drafter in fresh:
            for weight in drafter.parameters():
                torch.distributed.broadcast(weight.detach(), 0)
    return [line for line in lines if line]


@torch.no_grad()
def _features(drafter: Drafter, samples: Sequence[Sample], source: FeatureSource, shown: bool) -> Iterator[Features]:
    """Read as many texts as the drafter asks for."""
    chosen = chosen_texts(samples, drafter.start_positions)
    with progress("fitting start values", "token", sum(len(samples[i].tokens) for i in chosen), shown) as bar:
        for indices in batches_by_length(samples, chosen, CPU_POSITIONS if drafter.backbone.device.type == "cpu" else FORWARD_TOKENS):
            yield source.read(collate(samples, [[i] for i in indices]).to(drafter.backbone.device))
            bar.update(sum(len(samples[i].tokens) for i in indices))
