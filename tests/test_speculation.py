"""How much is drafted and read: what scores are worth, what passes cost, who rests, and what is chosen of it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from families import Scripted, backbone, left_padded, prompts, random_drafter, say, unpadded

from headstart.inference.capture.capture import Capturer
from headstart.inference.engine.tree import Pool, TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.sources.expansion import DraftScoring
from headstart.inference.sources.proposer import Candidates, Proposer
from headstart.inference.speculation.calibration import Calibration, Table
from headstart.inference.speculation.cost_model import SIZES, Costs, CostsByLength, Recent
from headstart.inference.speculation.draft import Draft
from headstart.inference.speculation.source_stats import LONGEST_REST, REST, TRIAL, SourceStats
from headstart.inference.speculation.speculation import Speculation


def test_a_table_starts_as_the_estimate_and_learns_what_it_is_worth() -> None:
    table, make = Table(), random.Random(1)
    for p in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert table.chance(math.log(p)) == pytest.approx(p, rel=0.15)
    for _ in range(4000):   # an over-sure proposer: right half as often as it says
        p = make.random()
        table.learn(math.log(p), make.random() < p / 2)
    for p in (0.2, 0.5, 0.8):
        assert table.chance(math.log(p)) == pytest.approx(p / 2, abs=0.08)
    assert 0 < table.chance(0.0) < 1 and 0 < table.chance(-1e9) < 0.02


def test_a_table_forgets_slowly() -> None:
    table = Table()
    for _ in range(3000):
        table.learn(math.log(0.5), True)
    for _ in range(1500):
        table.learn(math.log(0.5), False)
    assert table.chance(math.log(0.5)) < 0.1


def test_calibration_is_by_source_and_depth_and_survives_its_file() -> None:
    calibration = Calibration()
    for _ in range(50):
        calibration.table("a", 1).learn(-1.0, True)
        calibration.table("b", 1).learn(-1.0, False)
    again = Calibration.from_json(calibration.to_json())
    for found in (calibration, again):
        assert found.table("a", 1).chance(-1.0) > 0.8 > 0.2 > found.table("b", 1).chance(-1.0)
        assert found.table("a", 2).chance(-1.0) == pytest.approx(math.exp(-1), rel=0.1)
        assert found.table("a", 30) is found.table("a", 99)


def test_one_slow_pass_says_nothing() -> None:
    recent = Recent()
    assert not recent
    for seconds in (1.0, 1.1, 90.0, 0.9, 1.0):
        recent.add(seconds)
    assert recent and recent.median == 1.0


def test_costs_between_and_beyond_what_was_timed() -> None:
    costs = Costs()
    assert not costs.knows(1)
    costs.add_pass(1, 1, 4e-3)
    assert costs.knows(1) and costs.of_pass(1, 11) == pytest.approx(4e-3 * 1.3), "a guess, until a tree has been timed"
    for nodes, seconds in ((8, 6e-3), (15, 8e-3)):
        costs.add_pass(1, nodes, seconds)
    assert costs.of_pass(1, 11) == pytest.approx(6.86e-3, rel=0.01) and costs.of_pass(1, 36) == pytest.approx(14e-3, rel=0.01)
    assert costs.of_pass(1, 2) >= costs.of_pass(1, 1)
    for _ in range(3):
        costs.add_pass(1, 11, 7.5e-3)
    assert costs.of_pass(1, 11) == 7.5e-3 and costs.of_pass(1, 8) <= 7.5e-3, "often enough timed to be believed"


def test_what_one_number_of_rows_costs_tells_of_another() -> None:
    """It is positions that cost: 8 ms and a third of one for each, here; no other number of rows starts from nothing."""
    costs = Costs()
    for rows, nodes in ((8, 1), (8, 12), (1, 12)):
        costs.add_pass(rows, nodes, 8e-3 + rows * nodes / 3e3)
    for rows, nodes in ((3, 1), (7, 1), (5, 16), (4, 10)):
        assert costs.knows(rows) and costs.of_pass(rows, nodes) == pytest.approx(8e-3 + rows * nodes / 3e3, rel=0.1), (rows, nodes)


def test_a_measured_curve_is_followed_and_drifts_with_the_machine() -> None:
    costs = CostsByLength.from_json({"300": {"1": [[1, 4e-3], [16, 7e-3], [64, 19e-3]]}}).at(400)
    assert costs.knows(1) and costs.of_pass(1, 40) == pytest.approx(13e-3) and costs.of_pass(1, 112) == pytest.approx(31e-3)
    costs.add_pass(1, 16, 14e-3)   # twice as slow today
    assert costs.of_pass(1, 64) == pytest.approx(38e-3) and costs.of_pass(1, 16) == 14e-3


def test_texts_of_another_length_cost_what_the_nearest_do_until_they_are_timed() -> None:
    known = CostsByLength()
    short = known.at(100)
    assert short is known.at(256) and short is not known.at(257) and not known.at(257).knows(1)
    known.forget()
    short = known.at(30)
    for nodes, seconds in ((1, 4e-3), (12, 8e-3)):
        short.add_pass(1, nodes, seconds)
    short.add("host", 1, 1e-3)
    long = known.at(5000)
    assert long.knows(1) and long.of_pass(1, 12) == 8e-3 and long.part("host", 1) == 1e-3
    long.add_pass(1, 1, 8e-3)   # plain steps behind a long text: trees are thought to take twice as long too
    assert long.of_pass(1, 12) == pytest.approx(16e-3) and short.of_pass(1, 12) == 8e-3
    for _ in range(3):
        long.add_pass(1, 12, 60e-3)
    assert long.of_pass(1, 12) == 60e-3 and known.at(6000).of_pass(1, 12) == 60e-3 and known.at(200).of_pass(1, 12) == 8e-3
    known.forget("host")
    assert known.at(5000).knows(1) and not known.at(5000).part("host", 1) and not known.at(30).part("host", 1)
    known.forget()
    assert not known.at(5000).knows(1)


def test_measured_contexts_stand_for_the_lengths_near_them() -> None:
    measured = {"256": {"1": [[1, 1.0], [8, 2.0]]}, "4096": {"1": [[1, 1.5], [8, 9.0]]}}
    known = CostsByLength.from_json(measured)
    assert [known.at(context).of_pass(1, 8) for context in (10, 400, 3000, 9000)] == [2.0, 2.0, 9.0, 9.0]
    known.at(10).add_pass(1, 1, 3.0)
    known.forget()
    assert known.at(10).of_pass(1, 8) == 2.0, "what was measured stays"


def test_a_source_that_costs_more_than_it_brings_rests_longer_each_time() -> None:
    source_stats, rests = SourceStats(), []
    for _ in range(6000):
        if source_stats.active():
            source_stats.note(credit=0.1, seconds=1e-3, rate=200.0)
            if source_stats.loss(rate=200.0, step=5e-3) > 0:   # a tenth of a token is worth half a millisecond
                source_stats.fail(step=5e-3, sources=1)
                rests.append(source_stats.resting)
    assert rests[:4] == [80, 2 * REST, 4 * REST, 8 * REST] and max(rests) == LONGEST_REST, "8 passes lost 0.8 steps, 1 % of 80"
    good = SourceStats()
    for _ in range(200):
        assert good.active()
        good.note(credit=1.0, seconds=1e-3, rate=200.0)
        assert good.loss(rate=200.0, step=5e-3) <= 0
    assert TRIAL < 200


def test_a_trial_is_over_when_it_has_lost_two_plain_steps() -> None:
    """Heads of random weights take about a step's time for nothing: they are not tried eight times first."""
    useless, passes = SourceStats(), 0
    while useless.loss(rate=200.0, step=5e-3) <= 0:
        useless.note(credit=0.0, seconds=6e-3, rate=200.0)
        passes += 1
    assert passes == 2
    useless.fail(step=5e-3, sources=1)
    assert useless.resting == 240, "12 ms, 2.4 steps"
    useless.fail(step=5e-3, sources=3)
    assert useless.resting == 720, "three sources share what trials may lose"


def pools(*chances: float) -> list[Pool]:
    pool = Pool(0)
    for token, chance in enumerate(chances):
        pool.add(0, 0, token, math.log(chance), chance)
    return [pool]


def chosen(draft_pools: list[Pool], curve: list[tuple[int, float]], room: list[int] | None = None, queued: bool = False) -> int:
    speculation = Speculation([], [], Capturer("off", torch.device("cpu")))
    speculation.costs = Costs({len(draft_pools): curve})
    return speculation.choose(Draft(draft_pools, room or [9] * len(draft_pools), queued=queued), None)[0].size


def test_the_size_is_the_one_with_the_most_tokens_a_second() -> None:
    likely, unlikely = pools(0.6, 0.2, 0.1), pools(0.02, 0.01)
    dear, cheap = [(1, 1.0), (2, 2.0), (3, 3.0)], [(1, 1.0), (64, 1.05)]
    assert chosen(likely, cheap) == 4 and chosen(likely, dear) == 1
    assert chosen(likely, [(1, 1.0), (2, 1.1), (3, 1.9)]) == 2
    assert chosen(unlikely, cheap) == 3 and chosen(unlikely, [(1, 1.0), (2, 1.1)]) == 1
    assert chosen([*likely, *unlikely], cheap) == 4, "rows share one size"


def test_a_batch_is_as_fast_as_its_slowest_rows() -> None:
    """What a row gains that others have to be waited for is worth little, unless another text waits for its place."""
    fast, slow, curve = pools(0.99), pools(0.01), [(1, 1.0), (2, 1.3)]
    assert chosen([*fast, *slow], curve) == 1 and chosen([*fast, *slow], curve, queued=True) == 2
    assert chosen([*fast, *slow], curve, room=[90, 9]) == 2, "the row that has most to write"
    assert chosen([*fast, *fast], curve) == 2 and chosen([*slow, *slow], curve, queued=True) == 1


class Parrot(Proposer):
    """Says what it was told the text would be: right, or wrong throughout."""

    def __init__(self, truths: list[list[int]], right: bool) -> None:
        self.name, self.truths, self.right = f"parrot {right}", truths, right
        self.texts: dict[int, list[int]] = {}
        self.asked = 0

    def open(self, row: int, tokens: list[int]) -> None:
        self.texts[row] = list(tokens)

    def extend(self, row: int, tokens: list[int]) -> None:
        self.texts[row] += tokens

    def propose(self, row: int, depth: int, nodes: int) -> Candidates:
        self.asked += 1
        text = self.texts[row]
        truth = next(t for t in self.truths if t[: len(text)] == text)
        coming = truth[len(text) : len(text) + min(depth, 6)]
        tokens = coming if self.right else [(token + 1) % 61 for token in coming]
        return Candidates(tokens, list(range(-1, len(tokens) - 1)), [-0.1] * len(tokens))


OPTIONS: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "return_dict_in_generate": True}


def test_a_proposer_that_is_right_is_read_and_one_that_is_wrong_rests() -> None:
    on, rows = backbone("llama"), {"input_ids": prompts((9,))[0][None]}
    truths = say(SpeculativeModel(on), rows, **OPTIONS | {"max_new_tokens": 150}).sequences.tolist()
    right, wrong = Parrot(truths, True), Parrot(truths, False)
    for proposers in ([right], [wrong], [right, wrong]):
        of, passes = SpeculativeModel(on, proposers=proposers), 0
        right.asked = wrong.asked = 0
        for _ in range(2):
            out = say(of, rows, **OPTIONS)
            assert out.sequences.tolist()[0] == truths[0][:69]
            passes += out.passes
        if right in proposers:
            assert out.tau > 3 and right.asked >= passes - 2, "all but the first, plain, step"
        assert wrong.asked <= 25, "it brings nothing: asked in two trials or three, and not of 118 passes"


@pytest.mark.parametrize("sample", [False, True])
def test_many_sources_write_what_plain_decoding_writes(sample: bool) -> None:
    on, rows = backbone("qwen3"), left_padded(prompts())
    options = OPTIONS | {"do_sample": sample, "seed": 4, "max_new_tokens": 30}
    truth = say(SpeculativeModel(on), rows, **options).sequences
    texts = unpadded(truth, rows)
    drafters = [random_drafter("eagle3", on), random_drafter("medusa", on), Scripted(on, texts, "nearly")]
    parrots = [Parrot(texts, True), Parrot(texts, False)]
    for tree in (None, TreeShape(14, 4)):
        for given in (drafters, parrots, [*drafters, *parrots]):
            out = say(SpeculativeModel(on, proposers=given), rows, tree=tree, **options)
            assert torch.equal(out.sequences, truth)
    assert out.tau > 2


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_waiting_texts_take_free_rows_and_come_back_in_order(batch: int) -> None:
    """Each gets what it gets alone with its seed, whoever its neighbours are; texts end at different times."""
    on, rows = backbone("llama"), left_padded(prompts((9, 1, 14, 4, 7, 3)))
    options: dict[str, Any] = {"do_sample": True, "seed": [5, 77, -3, 11, 0, 2], "max_new_tokens": 24, "eos_token_id": [4, 5, 15, 20]}
    together = say(SpeculativeModel(on), rows, **options)
    assert len({text.count(0) for text in together.tolist()}) > 2, "texts of several lengths"
    drafter = random_drafter("eagle3", on)
    for of in (SpeculativeModel(on, drafter), SpeculativeModel(on), SpeculativeModel(on, Scripted(on, unpadded(together, rows), "nearly"))):
        out = say(of, rows, batch=batch, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, together)
        assert [sum(run) for run in out.runs] == [sum(run) for run in say(of, rows, return_dict_in_generate=True, **options).runs]
    with pytest.raises(ValueError, match="batch.*at least 1; got 0"):
        say(of, rows, batch=0, **options)


def test_sizes_ascend() -> None:
    assert list(SIZES) == sorted(set(SIZES)) and SIZES[0] == 1


def test_what_was_recorded_disturbs_that_pass_alone() -> None:
    """A depth recorded in its last call must not keep later passes, which may never draft it again, from being timed."""
    speculation = Speculation([random_drafter("medusa", backbone("llama"), depth=3)], [], Capturer("off", torch.device("cpu")))
    read = Capturer("off", torch.device("cpu")).capture(lambda held: held, "nothing")
    deepest = speculation.growths[0].levels[2]
    speculation.begin(read, 9)
    deepest.disturbed += 1
    assert not speculation.tells(read)
    speculation.begin(read, 9)
    assert speculation.tells(read)
    speculation.costs.add_pass(1, 1, 9e-3)
    read.captures_made += 1
    assert speculation.tells(read) and not speculation.costs.knows(1), "passes by Python say nothing of recorded ones"
    speculation.costs.add_pass(1, 1, 4e-3)
    speculation.begin(read, 9)
    read.captures_made += 1
    assert speculation.tells(read) and speculation.costs.knows(1), "what is recorded later was never timed by Python"


def test_a_first_depth_is_always_drafted_and_a_further_one_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = Speculation([random_drafter("medusa", backbone("llama"), depth=3)], [], Capturer("off", torch.device("cpu")))
    speculation.learned.rate = 200.0
    speculation.costs.add_pass(1, 1, 5e-3)
    speculation.costs.add(f"level of {speculation.names[0]}", 1, 5e-4)   # a tenth of a token a depth
    monkeypatch.setattr(speculation.costs, "add", lambda *given: None)   # whatever it takes on this machine
    speculation.learned.expanding[0][:] = [0.01, 0.2, 0.2]
    features = backbone("llama").read(torch.arange(1, 6)[None])

    def depths() -> int:
        draft, growth = Draft([Pool(3)], [9]), speculation.growths[0]
        speculation.grow(draft, 0, growth.extend_state(features, None, 40), DraftScoring(), None)
        return draft.levels[0]

    found = [depths() for _ in range(400)]
    assert found[0] == 1 and min(found) == 1 and max(found) > 1
    assert found.index(max(found)) > 20, "little by little"
