"""A source of drafts in the decoding loop: one drafter or proposer with its state for the rows being decoded, and its statistics.

The loop has a list of sources and treats them alike. State lasts for one call to generate, statistics as long as the model is loaded.

A drafter drafts the levels of a beam as tensor functions: nothing is read by the host between them, so several levels can be one captured
call.

Shape suffixes: B batch, P positions, V vocabulary or draft vocabulary, W beam width, D width, K depths, X packed numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.heads.own_readout import largest
from headstart.inference.capture.plugin import region
from headstart.inference.engine.acceptance import Acceptance
from headstart.inference.engine.processing import Filters, Processing
from headstart.inference.engine.tree import Pool, TreeShape
from headstart.support.pytree import map_tensors

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


@dataclass(frozen=True)
class Rows:
    """The rows that a step drafts for."""

    roots: list[int]
    remaining: list[int]
    """The number of tokens that each row may still write after its root; no node has a higher level."""
    sequences: list[int]
    """The number of each row's sequence in the call."""
    cache: RaggedCache | None = None
    """The backbone's KV cache; None: the sources' states are prepared."""
    shape: TreeShape | None = None
    """A fixed tree size; None: adaptive."""
    scoring: Callable[[int], DraftScoring] = lambda depths: DraftScoring()  # noqa: E731
    """The scoring of drafts of so many depths."""
    queued: bool = False
    """True if other sequences are waiting for free rows."""

    def passes_left(self, tokens: Sequence[float]) -> float:
        """A measure of the remaining passes if each adds ``tokens`` tokens to each row.

        While other sequences are waiting, only the total matters; otherwise a batch takes about as long as its slowest row.
        """
        if self.queued or len(tokens) == 1:
            return 1 / sum(tokens)
        left = zip(self.remaining, tokens, strict=True)
        return sum((max(remaining, 1) / count) ** BATCH_POWER for remaining, count in left) ** (1 / BATCH_POWER)


class Accepted:
    """The tokens that one decoding step wrote, row by row."""

    def __init__(self, sequences: list[int], tokens: list[list[int]], paths: list[list[int]], features: Features) -> None:
        self.sequences, self.tokens = sequences, tokens
        """For each row, its sequence's number in the call and its new tokens, of which the last is the next root."""
        self._paths, self._verified = paths, features

    @cached_property
    def features(self) -> Features:
        """The features of the accepted nodes, right-padded."""
        if self._verified.tokens_BT.shape[1] == 1:  # an autoregressive step
            return self._verified
        counts, device = list(map(len, self._paths)), self._verified.tokens_BT.device
        if len(counts) == 1:  # without padding, which is less to do
            path_P = torch.tensor(self._paths[0], device=device)
            return map_tensors(lambda value_1N: value_1N.index_select(1, path_P), self._verified)
        longest = max(counts)
        path_BP = torch.tensor([path + [0] * (longest - len(path)) for path in self._paths], device=device)
        return self._verified.gather(path_BP, torch.arange(longest, device=device) < torch.tensor(counts, device=device)[:, None])


class Source(ABC):
    """One drafter or proposer. ``name``: the key of its statistics; ``depth``: the number of depths it drafts."""

    observe_top_k: int = 0
    """The number of most likely next tokens of each verified node to pass to `observe`; 0: it is not called."""
    most_rows: int = 1 << 31
    """The number of rows above which it does not draft in adaptive trees."""

    first_cost: float = 0.0
    """Cost of drafting a depth as a fraction of a plain step, before it has been timed."""

    def __init__(self, name: str, depth: int) -> None:
        self.name, self.depth = name, depth
        self.by_mode = {sampled: Acceptance() for sampled in (False, True)}
        """What its drafts are worth in greedy (False) and sampled (True) decoding, whose acceptance rates differ."""
        self.sampled = False

    @property
    def acceptance(self) -> Acceptance:
        """What its drafts are worth in this kind of decoding."""
        return self.by_mode[self.sampled]

    @property
    def counts(self) -> list[int]:
        """The numbers of depths that an adaptive tree may have of it, in ascending order."""
        return [self.depth]

    def fixed_depths(self, shape: TreeShape, remaining: int) -> int:
        """The number of depths to draft for a tree of this shape, where so many tokens may still be written."""
        return min(self.depth, remaining)

    def timed_as(self, rows: int, depths: int) -> tuple[Hashable, int]:
        """The name and size of its drafts of so many rows and depths in the cost model."""
        return self.name, depths

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

    def keep_up(self, rows: Rows) -> None:
        """Read what was written while nothing was drafted, before `draft`, whose time is then that of any draft."""
        return None

    @abstractmethod
    def draft(self, rows: Rows, pools: Sequence[Pool], depths: int) -> None:
        """Add nodes of at most so many depths to the pools."""

    def observe(self, tokens: list[int], top_tokens: list[list[int]], logprobs: list[list[float]]) -> None:
        """Receive the token of each verified node of a row, its `observe_top_k` most likely next tokens and their log-probabilities."""
        return None

    def prob(self, rows: Rows, row: int, depth: int, score: float) -> float:
        """A row's node's acceptance probability: calibrated for adaptive trees; for fixed ones ``exp(score)``, which is reproducible."""
        return self.acceptance.prob(rows.sequences[row], depth, score) if rows.shape is None else math.exp(score)


# The levels of a drafter's beam.


@dataclass(frozen=True)
class Level:
    """The nodes drafted at one depth; parents are indices into the previous level."""

    tokens_BW: Tensor
    parents_BW: Tensor
    scores_BW: Tensor
    """The drafter's log-probability of each node, given its parent."""
    totals_BW: Tensor
    """Scores summed along the path."""


@dataclass(frozen=True)
class Progress:
    """How far a drafter has drafted: its state, the next depth, and how many depths follow in one call."""

    state: Any
    hidden_BKD: Tensor | None
    """The current draft's hidden states of a drafter that gives all depths at once."""
    depth: int
    count: int


@dataclass(frozen=True)
class Nodes:
    """The nodes of one level on the host, by row."""

    tokens: list[list[int]]
    parents: list[list[int]]
    scores: list[list[float]]


def draft_levels(
    drafter: Drafter, progress: Progress, features: Features | None, before: Level, width: int, scoring: DraftScoring
) -> tuple[list[Level], Tensor, Any, Tensor | None]:
    """Draft the next depths below ``before``, expanding the ``width`` most likely nodes of each level.

    ``features``: of accepted tokens, by which the drafter's state is extended first. Returns the levels, their packed numbers for
    `unpacked`, the drafter's state and the hidden states of all depths, if it gives them.
    """
    state, hidden_BKD, levels = progress.state, progress.hidden_BKD, [before]
    if features is not None:
        with region():
            state = drafter.begin(features, state)
    for k in range(progress.count):
        depth, above = progress.depth + k, levels[-1]
        with region():
            if not drafter.all_depths_at_once:
                hidden, state = drafter.step(state, above.tokens_BW, above.parents_BW, depth)
            else:
                if not depth:
                    hidden_BKD, state = drafter.step(state, above.tokens_BW, above.parents_BW, 0)
                assert hidden_BKD is not None
                hidden = hidden_BKD[:, depth : depth + 1]
            logits_BWV = drafter.draft_logits(hidden, depth, above.tokens_BW).float()
            levels.append(_best(above, _scored(logits_BWV, scoring, k), width, drafter.vocabulary))
    return levels[1:], _packed(levels[1:]), state, hidden_BKD


def _scored(logits_BWV: Tensor, scoring: DraftScoring, index: int) -> Tensor:
    """The logits, as the scoring says; ``index``: the depth's place in its noise."""
    if scoring.noise_BPV is None or scoring.temperature_1 is None:
        return logits_BWV
    logits_BWV = logits_BWV / scoring.temperature_1
    if scoring.filters is not None:
        logits_BWV = scoring.filters(logits_BWV.flatten(0, 1)).reshape(logits_BWV.shape)
    return logits_BWV + scoring.noise_BPV[:, index, None]


def _best(above: Level, logits_BWV: Tensor, width: int, vocabulary: Tensor | None) -> Level:
    """The ``width`` nodes of the largest totals among all children of a level."""
    scores_BWV = logits_BWV.log_softmax(-1).expand(-1, above.tokens_BW.shape[1], -1)
    B, W, V = scores_BWV.shape
    totals_BM = (scores_BWV + above.totals_BW[..., None]).flatten(1).nan_to_num(nan=-1e30)  # diverged heads give nan
    totals_BW, best_BW = largest(totals_BM, min(width, int(W * V)))
    parents_BW, drafted_BW = best_BW // V, best_BW % V
    scores_BW = scores_BWV.flatten(1).gather(1, best_BW)
    tokens_BW = drafted_BW if vocabulary is None else vocabulary[drafted_BW]
    return Level(tokens_BW, parents_BW, scores_BW, totals_BW)


def _packed(levels: Sequence[Level]) -> Tensor:
    """Tokens and parents of each level, then the scores of all, as one float64 tensor ``[B, X]``, so that the host reads once."""
    whole_BX = torch.cat([part for level in levels for part in (level.tokens_BW, level.parents_BW)], 1)
    scores_BX = torch.cat([level.scores_BW for level in levels], 1)
    return torch.cat([whole_BX.double(), scores_BX.double()], 1)


def unpacked(packed_BX: Tensor, levels: Sequence[Level]) -> list[Nodes]:
    """Read the nodes of the levels, in one transfer."""
    rows, scores, at, found = packed_BX.tolist(), packed_BX.shape[1] // 3 * 2, 0, []
    for level in levels:
        W = level.tokens_BW.shape[1]
        tokens, parents = ([[*map(int, row[start : start + W])] for row in rows] for start in (2 * at, 2 * at + W))
        found.append(Nodes(tokens, parents, [row[scores + at : scores + at + W] for row in rows]))
        at += W
    return found
