"""Sources: drafters and proposers in the decoding loop, their state between drafts, their costs by depth, and timed passes."""

from typing import Any

import pytest
import torch
from families import DRAFTERS, backbone, left_padded, prompts, random_drafter, say

from headstart import Drafter, Features, SpeculativeModel
from headstart.inference.capture.capture import Capturer
from headstart.inference.capture.captured import void_running
from headstart.inference.engine.drafter_source import DrafterSource
from headstart.inference.engine.proposer import Candidates, Proposer
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.source import Rows
from headstart.inference.engine.tree import Pool, TreeShape
from headstart.inference.latency import PASS, Costs
from headstart.inference.policy import Draft, Policy

OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}


def source_of(drafter: Drafter) -> DrafterSource:
    return DrafterSource("0", drafter, Capturer("off", torch.device("cpu")))


class Recorder(Proposer):
    """Proposes nothing; in some passes, something else is captured meanwhile."""

    name = "recorder"

    def __init__(self, captured: tuple[int, ...]) -> None:
        self.captured, self.passes = captured, 0

    def open(self, sequence: int, tokens: list[int]) -> None:
        """It has no state."""

    def extend(self, sequence: int, tokens: list[int]) -> None:
        self.passes += 1
        if self.passes in self.captured:
            void_running()

    def propose(self, sequence: int, depths: int, nodes: int) -> Candidates:
        return Candidates([7], [-1], [-1.0])


def test_a_pass_in_which_something_was_captured_is_not_timed() -> None:
    """Levels are captured when first drafted, long after the forward pass; only the passes with a capture are left out."""
    timed, options = [], OPTIONS | {"tree": TreeShape(2, 1)}
    for captured in ((), (3, 6)):
        of = SpeculativeModel(backbone("shallow"), proposers=[Recorder(captured)], capture="off")
        out = say(of, {"input_ids": prompts((9,))[0][None]}, **options)
        (costs,) = of.engine(True).policy.costs.timed[""].values()
        timed.append(costs.steps)
    assert timed[1] == timed[0] - 2 == out.passes - 2


def measured() -> Costs:
    """A step of 5 ms, and nodes that cost little."""
    costs = Costs()
    for nodes in (1, 2, 64) * 3:
        costs.add(PASS, 1, nodes, 5e-3 + nodes * 1.6e-5)
    return costs


def depths_of(source: DrafterSource, costs: Costs, pool: Pool, remaining: int) -> int:
    """How deep it drafts, without trials."""
    policy = Policy([source])
    policy.budgets[source] = 0.0
    return policy.plan(Draft(Rows([3], [remaining], [0]), costs, [pool]), source).depths


def test_a_drafter_rests_where_a_proposer_is_sure() -> None:
    source, costs = source_of(random_drafter("medusa", backbone("shallow"), depth=3)), measured()
    costs.add(source.timed_as(1, 3)[0], 1, 3, 1e-3)
    source.acceptance.levels = [[0.9]]

    def depths(*probs: float) -> int:
        pool, node = Pool(3), 0
        for prob in probs:
            node = pool.add("suffix", node, 7, 0.0, prob)
        return depths_of(source, costs, pool, 9)

    assert depths() == 3 and depths(0.1, 0.1) == 3, "little was drafted"
    assert depths(0.97, 0.97, 0.97) == 0, "all was drafted"
    assert depths(0.97, 0.1) == 3, "further tokens may be won"


@pytest.mark.parametrize("remaining", [[-1], [0], [-1, 0], []])
def test_nothing_is_drafted_where_no_token_can_follow(remaining: list[int]) -> None:
    source = source_of(random_drafter("medusa", backbone("shallow"), depth=3))
    roots = [3] * len(remaining)
    for costs in (Costs(), measured()):
        for shape in (None, TreeShape(8, 2), TreeShape(8, 2, 3)):
            assert not Policy([source]).draft(Rows(roots, remaining, [*range(len(roots))], shape=shape), costs).parts


@pytest.mark.parametrize(("acceptance", "given", "drafted"), [(0.9, None, 4), (0.1, None, 1), (0.9, 2, 2), (0.9, 3, 3)])
def test_adaptive_trees_are_deeper_than_trained_where_drafts_are_accepted(acceptance: float, given: int | None, drafted: int) -> None:
    """Up to twice as deep, unless a depth is given; further depths are expected to be accepted as the last one is."""
    drafter = random_drafter("eagle3", backbone("shallow"), depth=2)
    drafter.set_depth(given)
    source, costs = source_of(drafter), measured()
    costs.add(source.timed_as(1, drafter.depth)[0], 1, drafter.depth, drafter.depth * 1e-3)
    source.acceptance.levels = [[0.9], [acceptance]]
    assert depths_of(source, costs, Pool(3), 20) == drafted
    assert depths_of(source, costs, Pool(3), 1) == 1


def test_near_the_end_of_a_text_as_many_depths_are_drafted_as_anywhere() -> None:
    """Three of four would be one more draft to capture, which is not among the compiled ones."""
    source = source_of(random_drafter("eagle3", backbone("shallow"), depth=4))
    policy, costs = Policy([source]), measured()
    costs.add(source.timed_as(1, 4)[0], 1, 4, 1e-3)
    source.acceptance.levels, policy.steps, policy.budgets[source] = [[0.9]] * 4, 100, 0.0

    def depths(remaining: int, costs: Costs = costs) -> int:
        return policy.plan(Draft(Rows([3], [remaining], [0]), costs, [Pool(3)]), source).depths

    assert [depths(20), depths(3), depths(1)] == [8, 2, 1], "the first choice stands"
    assert [depths(20, Costs()), depths(3, Costs())] == [4, 2], "the first trees"


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_extending_the_state_and_drafting_all_depths_are_one_call(kind: str) -> None:
    """From the first step on, in which the last tokens of the prompts extend the state; rows that end in between change nothing."""
    of = SpeculativeModel(backbone("shallow"), random_drafter(kind, backbone("shallow"), depth=3), capture="trace")
    rows, options = left_padded(prompts((9, 6))), {"do_sample": False, "max_new_tokens": 14}
    out = say(of, rows, tree=TreeShape(8, 3), return_dict_in_generate=True, **options)
    source = of.engine(True).policy.of_kind(DrafterSource)[0]
    assert source._round.calls == out.passes and source._round.fallback is None and source._round.captures_made
    assert not source._steps.calls + source._step.calls + source._extend.calls
    assert torch.equal(out.sequences, say(of, rows, speculate=False, **options))


def test_drafting_is_captured_once_however_many_tokens_were_accepted_and_after_whatever_draft() -> None:
    on = backbone("shallow")
    source = DrafterSource("eagle3", random_drafter("eagle3", on, depth=3), Capturer("trace", on.device))
    reader = Reader(on, source.drafter.taps, Capturer("off", on.device))
    features, cache = reader.prompts(torch.arange(1, 11).view(2, 5), torch.tensor([5, 5]))
    source.join([0, 1], [[], []], features)
    after_root, further = (on.read(torch.ones(2, count, dtype=torch.int64), taps=source.drafter.taps) for count in (1, 3))
    for accepted, width in ((0, 3), (2, 3), (1, 3), (3, 1), (1, 3), (2, 3)):
        place_BT = torch.arange(accepted).expand(2, accepted)
        source.append(after_root if accepted == 1 else further.gather(place_BT, place_BT < 3))
        source.draft(Rows([3, 4], [9, 9], [0, 1], cache, TreeShape(8, width, 3)), [Pool(3), Pool(4)], 3)
        if accepted == 3:
            source.select([1, 0])
    captures = source._round.captures_made
    assert source._round.calls == 5 and captures == 2, "for each width"


def test_what_was_written_while_nothing_was_drafted_is_read_before_a_draft_is_timed() -> None:
    """It had been timed with the draft: after a rest, drafts seemed too slow to be made at all."""
    on = backbone("shallow")
    drafter = random_drafter("eagle3", on, depth=3)
    whole, cache = Reader(on, drafter.taps, Capturer("off", on.device)).prompts(torch.arange(1, 31)[None], torch.tensor([30]))
    rested, fresh, (first, rest) = source_of(drafter), source_of(drafter), whole.split(25)
    rows = Rows([3], [9], [0], cache, TreeShape(8, 2, 3))
    rested.join([0], [[*range(6)]], first)
    Policy([rested]).draft(rows, Costs())
    rested.append(rest)
    fresh.join([0], [[*range(31)]], whole)
    draft, expected = (Policy([of]).draft(rows, Costs()) for of in (rested, fresh))
    assert rested._extend.calls == 1 and draft.seconds > draft.parts[rested].seconds
    assert draft.pools[0].tokens == expected.pools[0].tokens


@pytest.mark.parametrize("kind", DRAFTERS)
def test_rows_and_features_wait_until_a_draft_needs_them(kind: str) -> None:
    """Rows are joined, selected and extended between drafts: each drafts as if decoded by itself."""
    on = backbone("shallow")
    drafter = random_drafter(kind, on)
    read = on.read(torch.randint(1, 61, (2, 30), generator=torch.Generator().manual_seed(0)), taps=drafter.taps)

    def part(rows: list[int], first: int, end: int) -> Features:
        index_BT = torch.arange(first, end).expand(len(rows), -1)
        return read.rows(torch.tensor(rows)).gather(index_BT, torch.ones_like(index_BT, dtype=torch.bool))

    def drafted(source: DrafterSource, rows: int) -> list[list[int]]:
        source.prepare(30, 3, None)
        pools = [Pool(5) for _ in range(rows)]
        source.draft(Rows([5] * rows, [9] * rows, [*range(rows)], shape=TreeShape(40, 3)), pools, source.depth)
        return [pool.tokens for pool in pools]

    both = source_of(drafter)
    both.join([0], [[]], part([0], 0, 6))
    both.append(part([0], 6, 8))
    both.join([1], [[]], part([1], 0, 8))
    for step in range(8, 20):  # more than the limit of pending features
        both.append(part([0, 1], step, step + 1))
    both.select([1, 0, 1])
    both.append(part([1, 0, 1], 20, 22))
    both.select([2, 1])
    for tokens, row in zip(drafted(both, 2), (1, 0), strict=True):
        alone = source_of(drafter)
        alone.join([0], [[]], part([row], 0, 22))
        assert drafted(alone, 1) == [tokens]
    both.select([])
    assert both.state is None


def test_beams_of_several_rows_on_a_cpu_are_chains() -> None:
    """There every node takes time (LOG.md)."""
    source = source_of(random_drafter("medusa", backbone("shallow"), depth=3))
    source.start(sampled=True)
    assert [source.width(rows) for rows in (1, 2, 8)] == [4, 1, 1]
    sampled = source.timed_as(1, 3)
    source.start(sampled=False)
    assert source.timed_as(1, 3) != sampled, "their costs are kept apart"
