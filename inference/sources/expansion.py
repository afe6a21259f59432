"""How a drafter grows candidates: depth by depth from the likeliest nodes of the depth before, each depth one captured step.

Shape suffixes: B batch, W beam width, D width, V draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.inference.capture.capture import Capturer


@dataclass(frozen=True)
class Filters:
    """What keeps unlikely tokens out of a sample; the draft's logits are filtered as the backbone's are."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __call__(self, logits_NV: Tensor) -> Tensor:
        """-inf where a token is out (0, 1 and 0 filter nothing)."""
        nothing: Any = None   # these do not look at the text
        if self.top_k:
            logits_NV = TopKLogitsWarper(self.top_k)(nothing, logits_NV)
        if self.top_p < 1:
            logits_NV = TopPLogitsWarper(self.top_p)(nothing, logits_NV)
        if self.min_p:   # transformers' own cannot be captured
            chances_NV = logits_NV.softmax(-1)
            logits_NV = logits_NV.masked_fill(chances_NV < self.min_p * chances_NV.amax(-1, keepdim=True), -math.inf)
        return logits_NV


@dataclass(frozen=True)
class DraftScoring:
    """How candidates are scored: ``log softmax(logits / temperature + noise)``, added up along the path.

    The noise is that of the positions drafted, the same the backbone's pick will be made with; without it, ``log softmax(logits)``.
    """

    temperature_1: Tensor | None = None
    noise_BPV: Tensor | None = None
    """Of the positions the picks at the root, its children, ... are for, over the backbone's vocabulary."""
    filters: Filters | None = None

    def at(self, depth: int, vocabulary: Tensor | None) -> Tensor | None:
        """The noise ``[B, V]`` of what is drafted at that depth."""
        if self.noise_BPV is None:
            return None
        noise_BV = self.noise_BPV[:, depth]
        return noise_BV if vocabulary is None else noise_BV[:, vocabulary]


@dataclass(frozen=True)
class Level:
    """The nodes drafted at one depth; parents are places among the nodes of the level before."""

    tokens_BW: Tensor
    parents_BW: Tensor
    scores_BW: Tensor
    """Log chance of each, given its parent, by the drafter."""
    totals_BW: Tensor
    """Added up along the path."""


def _not_capturable(drafter: Drafter) -> str | None:
    """Why the drafter's steps are not captured; None if they are."""
    if not drafter.capturable:
        return f"{type(drafter).__name__} is not capturable"
    if any(weight.requires_grad for weight in drafter.parameters()):   # a capture would miss what training changes
        return "its weights are being trained"
    return None if drafter.backbone.device.type == "cpu" else "draft steps are captured on the CPU only"


class Growth:
    """One drafter's steps, captured where the drafter allows it."""

    def __init__(self, drafter: Drafter, capturer: Capturer) -> None:
        self.drafter = drafter
        unless = _not_capturable(drafter)
        self.begin = capturer.capture(self._begin, "drafter prefill", drafter, unless)
        self.levels = [capturer.capture(partial(self._level, depth), "draft level", drafter, unless) for depth in range(drafter.depth)]

    @property
    def disturbed(self) -> int:
        """Steps so far whose time says nothing (see `Captured`)."""
        return self.begin.disturbed + sum(level.disturbed for level in self.levels)

    def extend_state(self, features: Features, state: Any, length: int) -> Any:
        """The drafter's state with newly accepted tokens; ``length``: positions it must have room for, drafted nodes included."""
        if state is None:
            return self.drafter.reserve(self.drafter.begin(features), length)
        return self.begin(self.drafter.reserve(state, length), features)

    def level(self, depth: int, state: Any, before: Level, width: int, scoring: DraftScoring) -> tuple[Level, Any]:
        """The ``width`` likeliest nodes of that depth, and the drafter's state that knows the nodes ``before``."""
        if depth and self.levels[depth - 1].captures_made:   # so that one cost holds for all depths
            self.levels[depth].patience = 0
        noise_BV = scoring.at(depth, self.drafter.vocabulary)
        return self.levels[depth](state, before, width, noise_BV, scoring.temperature_1, scoring.filters)

    def _begin(self, state: Any, features: Features) -> Any:
        return self.drafter.begin(features, state)

    def _level(
        self,
        depth: int,
        state: Any,
        before: Level,
        width: int,
        noise_BV: Tensor | None,
        temperature_1: Tensor | None,
        filters: Filters | None,
    ) -> tuple[Level, Any]:
        hidden, state = self.drafter.step(state, before.tokens_BW, before.parents_BW, depth)
        logits_BWV = self.drafter.readout(hidden, depth, before.tokens_BW).float()
        if noise_BV is not None and temperature_1 is not None:
            logits_BWV = logits_BWV / temperature_1
            if filters is not None:
                logits_BWV = filters(logits_BWV.flatten(0, 1)).view(logits_BWV.shape)
            logits_BWV = logits_BWV + noise_BV[:, None]
        scores_BWV = logits_BWV.log_softmax(-1).expand(-1, before.tokens_BW.shape[1], -1)
        B, W, V = scores_BWV.shape
        totals_BM = (scores_BWV + before.totals_BW[..., None]).flatten(1).nan_to_num(nan=-1e30)  # heads that have diverged
        best = totals_BM.topk(min(width, int(W * V)))
        places_BW, drafted_BW = best.indices // V, best.indices % V
        scores_BW = scores_BWV.flatten(1).gather(1, best.indices)
        vocabulary = self.drafter.vocabulary
        tokens_BW = drafted_BW if vocabulary is None else vocabulary[drafted_BW]
        return Level(tokens_BW, places_BW, scores_BW, best.values), state


def root_level(roots: list[int], device: torch.device) -> Level:
    """The roots, as the level before the first."""
    roots_B1 = torch.tensor(roots, device=device)[:, None]
    zeros_B1 = torch.zeros(roots_B1.shape, device=device)
    return Level(roots_B1, torch.zeros_like(roots_B1), zeros_B1, zeros_B1)
