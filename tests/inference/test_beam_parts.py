"""Drafts of beams: observed scores replace them, and how many are worth verifying is learned."""

import math

import pytest
import torch

from headstart.inference.beam.drafts import Breadth, _corrected
from headstart.inference.engine.source import Level


def test_observed_top_k_replaces_drafts() -> None:
    tokens_BW, scores_BW = torch.arange(8).view(2, 4), -torch.arange(8.0).view(2, 4)
    level = Level(tokens_BW, torch.zeros_like(tokens_BW), scores_BW, scores_BW - 1)
    after_V = torch.full((60,), -math.inf)
    after_V[[50, 51, 52]] = torch.tensor([-0.1, -0.2, -0.3])
    corrected = _corrected(level, [None, after_V])
    assert torch.equal(corrected.tokens_BW[0], tokens_BW[0]) and torch.equal(corrected.totals_BW[0], scores_BW[0] - 1)
    assert corrected.tokens_BW[1, :3].tolist() == [50, 51, 52] and corrected.scores_BW[1, :3].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert torch.equal(corrected.totals_BW[1], corrected.scores_BW[1]) and corrected.totals_BW[1, 3] < -1e8, "nothing else is drafted"


def test_breadth_is_learned() -> None:
    breadth = Breadth(4)
    first = breadth.steps(3, 40)
    assert first[0, 0] == first[1, 4] == 0 < first[1, 6] < first[1, 8] < first[2, 8]
    assert all(depths <= 3 and depths * width <= 40 for depths, width in first)
    for _ in range(60):
        breadth.learn(0, 6)
        breadth.learn(1, math.inf)
        breadth.fade()
    steps = breadth.steps(12, 72)
    assert steps[1, 4] < 0.1 and 0.9 < steps[1, 6] < 1
    assert max(steps.values()) < 1.1, "the second depth is not worth its nodes"
    for _ in range(2000):
        breadth.fade()
    assert breadth.steps(3, 40) == pytest.approx(first, rel=0.05), "what is long ago counts no more"
