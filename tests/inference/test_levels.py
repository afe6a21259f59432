"""Levels of a draft: the most likely candidates, found by groups, and how many operations a level takes."""

from __future__ import annotations

import math

import pytest
import torch

from headstart.inference.sources.levels import GROUP, GROUPED, largest


@pytest.mark.parametrize("count", [1, 4, 10, 300])
@pytest.mark.parametrize("candidates", [300, GROUPED, GROUPED + 1, 3 * GROUPED - 5])
def test_they_are_those_of_topk(candidates: int, count: int) -> None:
    torch.manual_seed(candidates)
    values_BM = torch.randn(3, candidates)
    values_BM[0, GROUP : GROUP + 12] += 9  # several of them in one group
    values_BM[1, -2:] += 9  # in the last group, which may be padded
    values, indices = largest(values_BM, count)
    expected = values_BM.topk(count)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)


def test_padding_is_never_chosen() -> None:
    """Not even before the lowest numbers there are, as those of candidates that a filter excludes."""
    values_BM = torch.full((1, GROUPED + 1), torch.finfo(torch.float32).min)
    values_BM[0, [7, GROUPED]] = 0
    values, indices = largest(values_BM, 5)
    assert {7, GROUPED} < set(indices[0].tolist()) and int(indices.max()) <= GROUPED
    assert values[0, :2].tolist() == [0, 0] and math.isfinite(float(values.min()))
