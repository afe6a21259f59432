"""The draft of one decoding step: what sources add their nodes to, and what they need to know for it.

Shape suffixes: B batch, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from headstart.inference.engine.cache import RaggedCache
from headstart.inference.engine.cost_model import Costs
from headstart.inference.engine.processing import Filters, Processing
from headstart.inference.engine.sizes import BEAM_WIDTH
from headstart.inference.engine.tree import Pool, TreeShape

BATCH_POWER = 4
"""The power mean by which the passes left of a batch follow from those of its rows: 1 is the mean, infinity the slowest row."""


@dataclass(frozen=True)
class DraftScoring:
    """How candidates are scored: ``log softmax(logits / temperature + noise)``, added up along the path.

    The noise is that of the drafted positions, the same the backbone's picks are made with; without it, ``log softmax(logits)``.
    """

    temperature_1: Tensor | None = None
    noise_BPV: Tensor | None = None
    """Noise of the drafts of depth 0, 1, ..., over the backbone's vocabulary."""
    filters: Filters | None = None

    def at(self, depth: int, vocabulary: Tensor | None) -> Tensor | None:
        """The noise ``[B, V]`` of the drafts of that depth."""
        if self.noise_BPV is None:
            return None
        noise_BV = self.noise_BPV[:, depth]
        return noise_BV if vocabulary is None else noise_BV[:, vocabulary]

    @staticmethod
    def sampled(noise_BPV: Tensor | None, processing: Processing) -> DraftScoring:
        """As the backbone samples; without noise it is greedy, and drafts are scored by their logits alone."""
        if noise_BPV is None:
            return DraftScoring()
        return DraftScoring(torch.full((1,), processing.temperature, device=noise_BPV.device), noise_BPV, processing.filters)


@dataclass(eq=False)
class Draft:
    """One step's draft: a pool per row."""

    pools: list[Pool]
    remaining: list[int]
    """How many tokens each row may still write beyond its root: no node has a higher level."""
    sequences: list[int] = field(default_factory=list)
    """The number of each row's sequence in the call."""
    cache: RaggedCache | None = None
    """The backbone's."""
    shape: TreeShape | None = None
    """A fixed size; None: adaptive."""
    scoring: DraftScoring = field(default_factory=DraftScoring)
    costs: Costs = field(default_factory=Costs)
    rate: float = 0.0
    """Recent tokens per second; 0: not known yet."""
    queued: bool = False
    """True if other sequences wait for these rows to end."""
    seconds: dict[Hashable, float] = field(default_factory=dict)
    """By source."""
    depths: dict[Hashable, int] = field(default_factory=dict)
    """How many depths each drafter has drafted."""
    kept: list[list[int]] = field(default_factory=list)
    """The nodes of each pool that are verified, in the order of the tree."""

    @property
    def width(self) -> int:
        """Nodes of a level that are expanded."""
        return self.shape.width if self.shape is not None else BEAM_WIDTH

    @cached_property
    def node_seconds(self) -> float:
        """Seconds that one more node costs to verify."""
        rows = len(self.pools)
        return (self.costs.of_pass(rows, BEAM_WIDTH) - self.costs.of_pass(rows, 1)) / (BEAM_WIDTH - 1)

    def passes_left(self, tokens: list[float]) -> float:
        """How many passes are left if each adds so many tokens to each row. While other sequences wait for a row, all tokens count
        alike; else a batch takes as long as its rows have still to write, the slowest above all."""
        if self.queued or len(tokens) == 1:
            return 1 / sum(tokens)
        left = zip(self.remaining, tokens, strict=True)
        return sum((max(remaining, 1) / count) ** BATCH_POWER for remaining, count in left) ** (1 / BATCH_POWER)
