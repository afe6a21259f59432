"""Levels of a draft: the most likely candidates, found by groups, and how many operations a level takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import backbone, random_drafter
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.inference.sources.levels import GROUP, GROUPED, Level, Progress, draft_levels, largest
from headstart.inference.sources.source import DraftScoring


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


class Operations(TorchDispatchMode):
    """Counts the operations that compute or copy something; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += not (func.is_view or "_unsafe_view" in func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("width", "most"), [(1, 68), (4, 71)])
def test_a_further_depth_takes_few_operations(width: int, most: int) -> None:
    """On an accelerator each is a kernel, and all of them together take longer than reading the weights."""
    on = backbone("llama")
    drafter = random_drafter("eagle3", on)
    state = drafter.begin(on.read(torch.arange(1, 13)[None], taps=drafter.taps)).reserve(64)
    zero_B1 = torch.zeros(1, 1)
    root = Level(torch.tensor([[5]]), torch.zeros(1, 1, dtype=torch.int64), zero_B1, zero_B1)
    counts = []
    for depths in (2, 3, 4):
        with Operations() as operations:
            draft_levels(drafter, Progress(state, None, 0, depths), None, root, width, DraftScoring.sampled(None, None))
        counts.append(operations.count)
    assert counts[2] - counts[1] == counts[1] - counts[0] <= most
