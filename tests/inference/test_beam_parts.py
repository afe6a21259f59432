"""How many drafts of a beam are worth verifying is learned."""

import math

import pytest

from headstart.inference.beam.drafts import Breadth


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
