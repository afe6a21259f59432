"""A source of drafts in the decoding loop: one drafter or proposer with its state for the rows being decoded, and its statistics.

The loop has a list of sources and treats them alike. State lasts for one call to generate, statistics as long as the model is loaded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from headstart.heads.backbone.features import Features
from headstart.inference.engine.tree import Pool, TreeShape
from headstart.inference.sources.calibration import Calibration
from headstart.inference.sources.draft import Draft
from headstart.inference.sources.source_stats import SourceStats

EMA_WEIGHT = 0.08
"""Weight of the last pass in a running average."""
FIRST_ACCEPTANCE = 0.7
"""The assumed acceptance rate of a depth before any draft of that depth has been verified."""


class Accepted:
    """The tokens that one decoding step wrote, row by row."""

    def __init__(self, sequences: list[int], tokens: list[list[int]], paths: list[list[int]], features: Features) -> None:
        self.sequences, self.tokens = sequences, tokens
        """For each row, its sequence's number in the call and its new tokens, of which the last is the next root."""
        self._paths, self._verified = paths, features

    @cached_property
    def features(self) -> Features:
        """The features of the accepted nodes, right-padded."""
        if self._verified.tokens_BT.shape[1] == 1:   # an autoregressive step
            return self._verified
        counts, device = list(map(len, self._paths)), self._verified.tokens_BT.device
        longest = max(counts)
        path_BP = torch.tensor([path + [0] * (longest - len(path)) for path in self._paths], device=device)
        return self._verified.gather(path_BP, torch.arange(longest, device=device) < torch.tensor(counts, device=device)[:, None])


@dataclass
class Learned:
    """Statistics of a source's verified drafts, for greedy or for sampled decoding."""

    calibration: Calibration
    acceptance: list[float]
    """For each depth, a drafter's acceptance rate given that the parent was accepted."""
    masses: list[float]
    """For each depth, the probability that a row's accepted path reaches a node drafted there, as the drafter estimates it: recent mean."""
    limit: int
    """The maximum number of depths of the next adaptive tree."""
    stats: dict[int, SourceStats] = field(default_factory=lambda: defaultdict(SourceStats))
    """By `octave` of the number of rows."""


class Source(ABC):
    """One drafter or proposer. ``name``: the key of its statistics; ``depth``: the number of depths it drafts."""

    observe_top_k: int = 0
    """The number of most likely next tokens of each verified node to pass to `observe`; 0: it is not called."""
    most_rows: int = 1 << 31
    """The number of rows above which it does not draft in adaptive trees."""

    def __init__(self, name: str, depth: int) -> None:
        self.name, self.depth = name, depth
        self.by_mode = {sampled: Learned(Calibration(), [FIRST_ACCEPTANCE] * depth, [1.0] * depth, depth) for sampled in (False, True)}
        """Statistics of greedy (False) and sampled (True) decoding, whose acceptance rates differ."""
        self.sampled = False

    @property
    def learned(self) -> Learned:
        """The statistics of this kind of decoding."""
        return self.by_mode[self.sampled]

    def noise_depths(self, shape: TreeShape | None) -> int:
        """The number of depths for which `draft` needs noise when sampling."""
        return 0

    # The rows being decoded.

    def start(self, sampled: bool) -> None:
        """Start a call to generate, initially without rows."""
        self.sampled = sampled

    @abstractmethod
    def join(self, sequences: list[int], tokens: list[list[int]], features: Features) -> None:
        """Append rows, given the numbers of their sequences, their prompts followed by the root, and the features of the prompts."""

    @abstractmethod
    def extend(self, accepted: Accepted) -> None:
        """Add the accepted tokens of every row."""

    def select(self, rows: list[int]) -> None:
        """Keep these rows, in this order; rows may be dropped or repeated."""
        return None

    # Drafting.

    @abstractmethod
    def draft(self, draft: Draft) -> None:
        """Add nodes to the pools, and the time taken to ``draft.seconds``."""

    def observe(self, tokens: list[int], top_tokens: list[list[int]], logprobs: list[list[float]]) -> None:
        """Receive the token of each verified node of a row, its `observe_top_k` most likely next tokens and their log-probabilities."""
        return None

    def verified(self, sequence: int, tokens: Sequence[int], parents: Sequence[int], picks: Sequence[int]) -> None:
        """Receive a row's verified tree, the root first, and the pick at every node; ``sequence``: its number in the call."""
        return None

    def prob(self, draft: Draft, depth: int, score: float) -> float:
        """The acceptance probability of a node: calibrated for adaptive trees; for fixed ones ``exp(score)``, which is reproducible."""
        return self.learned.calibration.table(depth).prob(score) if draft.shape is None else math.exp(score)

    # Learning.

    def learn(self, pool: Pool, accepted: dict[int, int], depths: int) -> None:
        """Learn from a verified row. ``accepted``: the pick at each accepted node of the pool; ``depths``: how many depths were drafted."""
        hits = [False] * depths
        acceptance = self.learned.acceptance
        acceptance += acceptance[-1:] * (depths - len(acceptance))   # a tree may be deeper than the drafter's depth
        for proposal in pool.proposals:
            if proposal.source is not self:
                continue
            parent = pool.parents[proposal.node]
            if parent in accepted:
                depth = pool.levels[parent]
                self.learned.calibration.table(depth).learn(proposal.score, pool.tokens[proposal.node] == accepted[parent])
                if proposal.node in accepted and depth < depths:
                    hits[depth] = True
        for depth in range(min(depths, len(accepted))):   # depths whose parents were accepted
            acceptance[depth] += EMA_WEIGHT / 2 * (hits[depth] - acceptance[depth])
            if not hits[depth]:
                break
