"""A source of drafts in the decoding loop: one drafter or proposer with its state for the rows being decoded, and what was learned of it.

The loop keeps a list of sources and treats them alike. State lasts for one call to generate, statistics for as long as the model is loaded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from headstart.heads.backbone.features import Features
from headstart.inference.engine.tree import Pool, TreeShape
from headstart.inference.sources.calibration import Calibration
from headstart.inference.sources.draft import Draft
from headstart.inference.sources.source_stats import EMA_WEIGHT, SourceStats

FIRST_ACCEPTANCE = 0.7
"""The acceptance rate of a drafter's depth before it has been verified."""


class Accepted:
    """The tokens that one decoding step wrote, row by row."""

    def __init__(self, sequences: list[int], tokens: list[list[int]], paths: list[list[int]], features: Features) -> None:
        self.sequences, self.tokens = sequences, tokens
        """The number of each row's sequence in the call, and its new tokens; the last one is the next root."""
        self._paths, self._verified = paths, features

    @cached_property
    def features(self) -> Features:
        """The features of the accepted nodes, rows right-padded."""
        if self._verified.tokens_BT.shape[1] == 1:   # an autoregressive step
            return self._verified
        counts, device = list(map(len, self._paths)), self._verified.tokens_BT.device
        longest = max(counts)
        path_BP = torch.tensor([path + [0] * (longest - len(path)) for path in self._paths], device=device)
        return self._verified.gather(path_BP, torch.arange(longest, device=device) < torch.tensor(counts, device=device)[:, None])


@dataclass
class Learned:
    """Statistics of a source's verified drafts, in greedy or in sampled decoding."""

    calibration: Calibration
    stats: SourceStats
    acceptance: list[float]
    """Of a drafter, per depth, how often a draft of its was accepted there when its parent was."""


class Source(ABC):
    """One drafter or proposer. ``depth``: how many depths it drafts; ``name``: the one its statistics are kept under."""

    observe_top_k: int = 0
    """How many of the likeliest next tokens `observe` wants of each verified node; 0: it is not called."""

    def __init__(self, name: str, depth: int) -> None:
        self.name, self.depth = name, depth
        self.by_mode = {sampled: Learned(Calibration(), SourceStats(), [FIRST_ACCEPTANCE] * depth) for sampled in (False, True)}
        """Greedy (False) and sampled sequences: drafts are not accepted alike."""
        self.learned = self.by_mode[False]

    def noise_depths(self, shape: TreeShape | None) -> int:
        """How many depths of noise `draft` needs when sampling."""
        return 0

    # The rows being decoded.

    def start(self, sampled: bool) -> None:
        """A call to generate begins, without rows."""
        self.learned = self.by_mode[sampled]

    @abstractmethod
    def join(self, sequences: list[int], tokens: list[list[int]], features: Features) -> None:
        """New rows behind those there are: the numbers of their sequences, their prompts with the root, the prompts' features."""

    @abstractmethod
    def extend(self, accepted: Accepted) -> None:
        """Every row has been written to."""

    def select(self, rows: list[int]) -> None:
        """Go on with these rows, in this order; a row may be left out or come twice."""
        return None

    # Drafting.

    @abstractmethod
    def draft(self, draft: Draft) -> None:
        """Add nodes to the pools, and the time it took to ``draft.seconds``."""

    def observe(self, tokens: list[int], top_tokens: list[list[int]], logprobs: list[list[float]]) -> None:
        """For each verified node of a row its token, the `observe_top_k` likeliest next tokens and their log-probabilities."""
        return None

    def prob(self, draft: Draft, depth: int, score: float) -> float:
        """The acceptance probability of a node with that score: calibrated where the tree adapts, else the score's own, always the same."""
        return self.learned.calibration.table(depth).prob(score) if draft.shape is None else math.exp(score)

    # Learning.

    def learn(self, pool: Pool, accepted: dict[int, int], depths: int) -> None:
        """A row was verified. ``accepted``: the pick at each accepted node of the pool; ``depths``: how many a drafter has drafted."""
        hits = [False] * depths
        acceptance = self.learned.acceptance
        acceptance += [FIRST_ACCEPTANCE] * (depths - len(acceptance))   # a tree may be deeper than the drafter usually drafts
        for proposal in pool.proposals:
            if proposal.source is not self:
                continue
            parent = pool.parents[proposal.node]
            if parent in accepted:
                depth = pool.levels[parent]
                self.learned.calibration.table(depth).learn(proposal.score, pool.tokens[proposal.node] == accepted[parent])
                if proposal.node in accepted and depth < depths:
                    hits[depth] = True
        for depth in range(min(depths, len(accepted))):   # those whose parents were accepted
            acceptance[depth] += EMA_WEIGHT / 2 * (hits[depth] - acceptance[depth])
            if not hits[depth]:
                break
