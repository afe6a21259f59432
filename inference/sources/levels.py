"""Drafts the levels of a beam as tensor functions: nothing is read by the host between them, so several levels can be one captured call.

Shape suffixes: B batch, W beam width, D width, K depths, V draft vocabulary, X packed numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.own_readout import largest
from headstart.inference.capture.plugin import region
from headstart.inference.sources.source import DraftScoring


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
    numbers_BX, found, at = packed_BX.numpy(force=True), [], 0
    whole_BX, scores_BX = np.split(numbers_BX, [numbers_BX.shape[1] // 3 * 2], 1)
    whole_BX = whole_BX.astype(int)
    for level in levels:
        W = level.tokens_BW.shape[1]
        tokens, parents = whole_BX[:, 2 * at : 2 * at + W], whole_BX[:, 2 * at + W : 2 * (at + W)]
        found.append(Nodes(tokens.tolist(), parents.tolist(), scores_BX[:, at : at + W].tolist()))
        at += W
    return found
