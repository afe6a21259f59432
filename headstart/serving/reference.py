"""Drafts that served heads are held to: after states and tokens that a formula gives, so that no backbone runs for them.

``headstart export`` stores those of the trained heads in the folder, and `headstart verify` compares what the folder drafts. A draft agrees
if it is the likeliest token and its logit, and the mean of all logits, are those stored, but for rounding.

Shape suffixes: B batch, T positions, D width, K depth, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter

TOKENS, PLACES, DEPTH = 64, (9, 30, 64), 8
"""Length of the text, after how many of its tokens drafts are made, and how many at most."""
TOLERANCE = 2e-4
"""The largest difference of logits that fp32 arithmetic in another order makes, relative to the largest logit."""


@dataclass(frozen=True)
class Agreement:
    """How many of the expected drafts were made, and the largest difference of logits, relative to the largest one."""

    drafts: int
    equal: int
    distance: float

    @property
    def whole(self) -> bool:
        return self.equal == self.drafts and self.distance <= TOLERANCE


@torch.no_grad()
def reference(drafter: Drafter) -> list[dict[str, Any]]:
    """Return drafts after some places of the text, with their logits, as data. A drafter in fp32."""
    found = []
    for place in PLACES:
        logits_KV = draft_logits(drafter, *_text(drafter, place), min(drafter.depth, DEPTH))
        drafts = logits_KV.argmax(-1).tolist()
        figures = [[float(f"{x:.7g}") for x in _figures(logits_V, token)] for logits_V, token in zip(logits_KV, drafts, strict=True)]
        found.append({"place": place, "drafts": drafts, "logits": figures})
    return found


@torch.no_grad()
def agreement(drafter: Drafter, expected: Sequence[dict[str, Any]]) -> Agreement:
    """Compare the drafts of a drafter with those of `reference`, each given the expected drafts before it."""
    equal, distance = 0, 0.0
    for text in expected:
        if drafter.max_depth is not None and drafter.max_depth < len(text["drafts"]):
            continue
        logits_KV = draft_logits(drafter, *_text(drafter, text["place"]), len(text["drafts"]), text["drafts"])
        equal += sum(are_picks(logits_KV, text["drafts"]))
        for logits_V, token, figures in zip(logits_KV, text["drafts"], text["logits"], strict=True):
            largest = float(logits_V[logits_V.isfinite()].abs().max())
            gap = max(abs(a - b) for a, b in zip(_figures(logits_V, token), figures, strict=True)) / max(largest, 1e-6)
            distance = max(distance, math.inf if math.isnan(gap) else gap)
    return Agreement(sum(len(text["drafts"]) for text in expected), equal, distance)


def _figures(logits_V: Tensor, token: int) -> list[float]:
    """The logit of a token and the mean of all tokens that can be drafted."""
    return [float(logits_V[token]), float(logits_V[logits_V.isfinite()].double().mean())]


def are_picks(logits_KV: Tensor, tokens: Sequence[int]) -> list[bool]:
    """Whether each token is the most likely one, or as likely but for rounding."""
    rounding_K = TOLERANCE * logits_KV.where(logits_KV.isfinite(), 0.0).abs().amax(-1)
    own_K = logits_KV.gather(-1, torch.tensor(tokens, device=logits_KV.device)[:, None])[:, 0]
    picks: list[bool] = (own_K >= logits_KV.amax(-1) - rounding_K).tolist()
    return picks


@torch.no_grad()
def draft_logits(drafter: Drafter, features: Features, root: int, depth: int, drafts: Sequence[int] | None = None) -> Tensor:
    """Return the logits ``[K, V]`` of a chain of drafts after features ``[1, T]`` and the root; -inf: never drafted.

    Each draft follows those of ``drafts`` before it (None: the likeliest ones).
    """
    state = drafter.reserve(drafter.begin(features), features.tokens_BT.shape[1] + 1 + 2 * depth)
    zero_11, token, logits, at_once = torch.zeros_like(features.tokens_BT[:, :1]), root, list[Tensor](), drafter.all_depths_at_once
    for k in range(depth):
        token_11 = torch.full_like(zero_11, token)
        if k == 0 or not at_once:
            hidden, state = drafter.step(state, token_11, zero_11, k)
        logits_DV = drafter.readout(hidden[:, k : k + 1] if at_once else hidden, k, token_11)[0, 0].float()
        whole_V = logits_DV.new_full((drafter.backbone.vocab,), -torch.inf)
        logits.append(logits_DV if drafter.vocabulary is None else whole_V.scatter(0, drafter.vocabulary, logits_DV))
        token = int(logits[-1].argmax()) if drafts is None else drafts[k]
    return torch.stack(logits)


def _text(drafter: Drafter, place: int) -> tuple[Features, int]:
    """Return the features of the first tokens but the last, which is the root, and the root."""
    dim, vocab = drafter.backbone.dim, drafter.backbone.vocab
    tokens_1T = (_noise(0, 1, TOKENS) + 1).mul(vocab / 2).long().clamp(max=vocab - 1)
    states = {tap: _noise(1 + tap, 1, TOKENS, dim)[:, : place - 1] for tap in drafter.taps}
    hidden_1TD = _noise(1 + drafter.backbone.num_layers + 1, 1, TOKENS, dim)[:, : place - 1]
    return Features(tokens_1T[:, : place - 1], hidden_1TD, states or None), int(tokens_1T[0, place - 1])


def _noise(number: int, *shape: int) -> Tensor:
    """Return numbers from -1 to 1, the same on every machine and in every version of torch."""
    x = (torch.arange(math.prod(shape)) + number * 1_000_003) * 2654435761 % 2**32
    x = (x ^ x >> 15) * 2246822519 % 2**32
    return ((x ^ x >> 13).double() / 2**31 - 1).float().view(shape)
