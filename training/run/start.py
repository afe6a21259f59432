"""How new drafters start: trained heads (``drafter.init``), draft vocabularies, and values fitted to the training text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.warm_start import WarmStart, read_warm_start
from headstart.training.data.sample import Sample
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


def fit_starts(drafters: Mapping[str, Drafter], starts: Mapping[str, WarmStart], samples: Sequence[Sample]) -> list[str]:
    """Let new drafters fit their start values to texts of the training data; returns lines for the log. Every process does the same."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()   # of a mix, some of each part
    lines = (drafter.fit_start(_features(drafter, (samples[i] for i in order))) for name, drafter in drafters.items() if name not in starts)
    return [line for line in lines if line]


@torch.no_grad()
def _features(drafter: Drafter, samples: Iterator[Sample]) -> Iterator[Features]:
    for sample in samples:
        yield drafter.backbone.read(sample.tokens[None].to(drafter.backbone.device), taps=drafter.taps)
