"""The draft of one decoding step: the pools to which sources add nodes, and the data that the sources need.

Shape suffixes: B batch, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headstart.heads.kv.ragged_cache import RaggedCache
from headstart.inference.engine.filters import Filters
from headstart.inference.engine.processing import Processing
from headstart.inference.engine.tree import Pool, TreeShape

BATCH_POWER = 4
"""Exponent of the power mean that combines the remaining passes of a batch's rows; infinity would be the slowest row alone."""


@dataclass(frozen=True)
class DraftScoring:
    """Scoring of candidates: ``log softmax(logits / temperature + noise)``, summed along the path.

    The noise is that of the backbone's picks at the drafted positions; without noise, scores are ``log softmax(logits)``.
    """

    temperature_1: Tensor | None = None
    noise_BPV: Tensor | None = None
    """Noise for the drafts of depth 0, 1, ..., over the backbone's vocabulary."""
    filters: Filters | None = None

    def at(self, depths: range, vocabulary: Tensor | None) -> DraftScoring:
        """The scoring of the drafts of these depths alone, over the draft vocabulary if one is given."""
        if self.noise_BPV is None:
            return self
        noise_BPV = self.noise_BPV[:, depths.start : depths.stop]
        return replace(self, noise_BPV=noise_BPV if vocabulary is None else noise_BPV[:, :, vocabulary])

    @staticmethod
    def sampled(noise_BPV: Tensor | None, processing: Processing) -> DraftScoring:
        """Scoring that matches the backbone's sampling; greedy without noise."""
        if noise_BPV is None:
            return DraftScoring()
        device = noise_BPV.device
        temperature_1 = torch.full((1,), processing.temperature, dtype=torch.float32, device=device)
        return DraftScoring(temperature_1, noise_BPV, processing.filters(device))


@dataclass(eq=False)
class Draft:
    """One step's draft: a pool per row."""

    pools: list[Pool]
    remaining: list[int]
    """The number of tokens that each row may still write after its root; no node has a higher level."""
    sequences: list[int] = field(default_factory=list)
    """The number of each row's sequence in the call."""
    cache: RaggedCache | None = None
    """The backbone's KV cache."""
    shape: TreeShape | None = None
    """A fixed tree size; None: adaptive."""
    scoring: Callable[[int], DraftScoring] = lambda depths: DraftScoring()  # noqa: E731
    """The scoring of drafts of so many depths."""
    queued: bool = False
    """True if other sequences are waiting for free rows."""
    seconds: dict[Hashable, float] = field(default_factory=dict)
    """Drafting time by source."""
    depths: dict[Hashable, int] = field(default_factory=dict)
    """The number of depths that each source drafted."""
    least: int = 1
    """Nodes of a row's tree at least, as far as there are drafts."""
    trial: tuple[Any, float] | None = None
    """The source that drafts though it is not expected to pay, and the seconds that the step is expected to take."""
    kept: list[list[int]] = field(default_factory=list)
    """The nodes of each pool chosen for verification, in the order of the tree."""

    def __post_init__(self) -> None:
        self.sequences = self.sequences or [*range(len(self.pools))]

    def missed(self, depths: int) -> list[float]:
        """For each depth, the probability that none of the nodes in the pools so far is accepted there, a mean over rows."""
        found = [0.0] * depths
        for pool in self.pools:
            for prob, level in zip(pool.path_probs()[1:], pool.levels[1:], strict=True):
                if level <= depths:
                    found[level - 1] += prob / len(self.pools)
        return [max(1 - prob, 0.0) for prob in found]

    def passes_left(self, tokens: Sequence[float]) -> float:
        """A measure of the remaining passes if each adds ``tokens`` tokens to each row.

        While other sequences are waiting, only the total matters; otherwise a batch takes about as long as its slowest row.
        """
        if self.queued or len(tokens) == 1:
            return 1 / sum(tokens)
        left = zip(self.remaining, tokens, strict=True)
        return sum((max(remaining, 1) / count) ** BATCH_POWER for remaining, count in left) ** (1 / BATCH_POWER)
