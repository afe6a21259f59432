"""How deep adaptive trees are drafted, and in which pieces a drafter's state is extended before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import DRAFTERS, backbone, random_drafter
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.inference.capture.capture import Capturer
from headstart.inference.engine.cost_model import Costs
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.tree import Pool
from headstart.inference.sources.depth_choice import note_masses
from headstart.inference.sources.draft import Draft
from headstart.inference.sources.drafter_source import DrafterSource
from headstart.inference.sources.source import EMA_WEIGHT
from headstart.inference.sources.source_stats import TRIAL_STEPS


def source_of(drafter: Drafter) -> DrafterSource:
    return DrafterSource("0", drafter, Capturer("off", torch.device("cpu")))


@pytest.mark.parametrize(
    ("acceptance", "given", "drafted"),
    [([0.9, 0.9], None, [2, 3, 3, 4]), ([0.9, 0.2], None, [1, 1, 1, 1]), ([0.9, 0.9], 2, [2, 2, 2, 2]), ([0.9, 0.9], 3, [3, 3, 3, 3])],
)
def test_adaptive_trees_are_deeper_than_trained_where_drafts_are_accepted(
    acceptance: list[float], given: int | None, drafted: list[int]
) -> None:
    """Up to twice as deep, unless a depth is given; further depths are expected to be accepted as the last one is."""
    drafter = random_drafter("eagle3", backbone("llama"), depth=2)
    drafter.set_depth(given)
    source, costs = source_of(drafter), Costs()
    costs.add_pass(1, 1, 5e-3)
    costs.add(source.part(drafter.depth), 1, drafter.depth * 1e-3)   # a fifth of a token each
    source.learned.acceptance[:] = acceptance + acceptance[1:] * (drafter.depth - 2)
    source.learned.masses[:] = [0.9, 0.9 * acceptance[1], 0.7][: drafter.depth]

    def depths(remaining: int) -> int:
        count, masses = len(source.depths(Draft([Pool(3)], [remaining], costs=costs, rate=200.0))), source.learned.masses
        masses += [masses[-1] * acceptance[-1] for _ in range(count - len(masses))]   # as if they had been drafted
        return count

    assert [depths(20), depths(20)] == drafted[:1] * 2, "nothing has been gained yet"
    source.learned.stats[0].note(2 * TRIAL_STEPS)
    assert [depths(20) for _ in drafted] == drafted
    assert source.noise_depths(None) == max(drafter.depth, *drafted) and depths(1) == 1
    source.start(sampled=True)
    assert source.noise_depths(None) == drafter.depth, "which is learned for sampling apart"


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_state_may_be_extended_in_two_calls_of_which_one_has_nothing_of_a_row(kind: str) -> None:
    on = backbone("llama")
    drafter = random_drafter(kind, on)
    features = on.read(torch.arange(1, 25).view(2, 12), taps=drafter.taps)
    place_BT, roots_B1 = torch.arange(12).expand(2, 12), torch.tensor([[3], [4]])
    prompt = features.gather(place_BT[:, :5], place_BT[:, :5] < 5)
    more = features.gather(place_BT[:, 5:], place_BT[:, :7] < torch.tensor([[7], [2]]))

    def drafted(*parts: Features) -> Tensor:
        state = drafter.begin(prompt)
        for part in parts:
            state = drafter.begin(part, drafter.reserve(state, 40))
        hidden, _ = drafter.step(drafter.reserve(state, 40), roots_B1, torch.zeros_like(roots_B1), 0)
        return drafter.readout(hidden[:, :1], 0, roots_B1)

    first, last = more.split(4)
    assert first.lengths_B.tolist() == [3, 0] and last.lengths_B.tolist() == [4, 2]
    torch.testing.assert_close(drafted(first, last), drafted(more))


@pytest.mark.parametrize(("rows", "left"), [(1, [2, 4, 2, 9]), (2, [4, 4, 4, 4])])
def test_where_captures_take_long_batches_draft_with_few_numbers_of_depths_and_one_of_positions(
    rows: int, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tokens each row accepted; the rest extends the state before. A single row has any number of them."""
    monkeypatch.setattr(Capturer, "slow", True)
    on = backbone("llama")
    source = source_of(random_drafter("eagle3", on, depth=3))
    assert source.choice.counts == [1, 2, 3] and source_of(random_drafter("eagle3", on, depth=5)).choice.counts == [1, 2, 4, 5]
    reader = Reader(on, source.drafter.taps, Capturer("off", on.device))
    tokens_BT = torch.arange(1, 1 + 7 * rows).view(rows, 7)
    features, cache = reader.prompts(tokens_BT, torch.tensor([7, 6][:rows]))
    source.join([*range(rows)], [[*range(1 + length)] for length in (7, 6)[:rows]], features)
    positions, drafted = [], source._drafted

    def noted(*args: Any) -> Any:
        positions.append(source._joined().tokens_BT.shape[1])
        return drafted(*args)

    monkeypatch.setattr(source, "_drafted", noted)
    further = on.read(torch.ones(rows, 9, dtype=torch.int64), taps=source.drafter.taps)
    for accepted in (0, 2, 4, 1, 9):
        if accepted:
            counts_B = torch.tensor([accepted, 1][:rows])
            place_BT = torch.arange(accepted).expand(rows, accepted)
            source.append(further.gather(place_BT, place_BT < counts_B[:, None]))
            cache.lengths_B = cache.lengths_B + counts_B
        source.draft(Draft([Pool(3) for _ in range(rows)], [9] * rows, cache=cache))
        assert source.state.caches[0].lengths_B.tolist() == (cache.lengths_B - 1).tolist(), "all but the last are paired with a token"
        assert source.state.pending_BD.is_contiguous(), "captures depend on strides"
    assert positions[1:] == left


def test_the_first_draft_of_a_further_depth_says_little() -> None:
    """Its nodes are expected to be reached as their parents and the last acceptance rate say; one unlikely draft changes that little."""
    source = source_of(random_drafter("eagle3", backbone("llama"), depth=2))
    source.learned.acceptance[:], source.learned.masses[:] = [0.9, 0.8], [0.9, 0.7]
    pool = Pool(3)
    nodes = [pool.add(source, max(depth - 1, 0), 5 + depth, -3.0, 0.01) for depth in range(3)]
    note_masses(source.learned, Draft([pool], [9]), [[[node]] for node in nodes])
    kept = 1 - EMA_WEIGHT   # of each mean, the parents' included
    assert source.learned.masses == pytest.approx([kept * 0.9, kept * 0.7, kept**2 * 0.7 * 0.8], abs=2e-3)
