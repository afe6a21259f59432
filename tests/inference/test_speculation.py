"""How much is verified: calibration, costs, and the choice of the tree (the whole of it on simulated machines: test_adaptive.py)."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from families import backbone, heads, prompts, say, tiny

import headstart
from headstart.heads.card import METADATA
from headstart.inference.engine.acceptance import Acceptance, Table
from headstart.inference.engine.source import Rows
from headstart.inference.engine.tree import Pool
from headstart.inference.latency import PASS, CostModel, Costs, RecentTimes
from headstart.inference.policy import Draft, Policy
from headstart.support.errors import UserError
from headstart.training.data.samples import whole
from headstart.training.evaluation import evaluate
from headstart.training.recipe.recipe import Eval


def test_a_table_starts_as_the_estimate_and_learns_what_it_is_worth() -> None:
    table, make = Table(), random.Random(1)
    for p in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert table.prob(math.log(p)) == pytest.approx(p, rel=0.15)
    for _ in range(4000):  # an overconfident proposer: right half as often as it claims
        p = make.random()
        table.learn(math.log(p), make.random() < p / 2)
    for p in (0.2, 0.5, 0.8):
        assert table.prob(math.log(p)) == pytest.approx(p / 2, abs=0.08)
    assert 0 < table.prob(0.0) < 1 and 0 < table.prob(-1e9) < 0.02


def test_one_slow_pass_says_nothing() -> None:
    recent = RecentTimes()
    for seconds, expected in ((90.0, 90.0), (1.0, 1.0), (1.1, 1.0), (0.9, 1.0), (10.0, 1.0), (10.0, 1.0), (10.0, 1.0), (10.0, 1.1)):
        assert not recent.add(seconds)
        assert recent.seconds == expected
    assert recent.add(0.44) and recent.seconds == 0.44, "all before were of a busy machine"
    assert not recent.add(0.1), "one alone may be what was loaded first"


def test_costs_between_and_beyond_what_was_timed() -> None:
    costs = Costs()
    costs.add(PASS, 1, 1, 4e-3)
    assert costs.of_pass(1, 11) == pytest.approx(4e-3 * 1.3), "a guess, until a tree has been timed"
    for nodes, seconds in ((8, 6e-3), (15, 8e-3)):
        costs.add(PASS, 1, nodes, seconds)
    assert costs.of_pass(1, 11) == pytest.approx(6.86e-3, rel=0.01) and costs.of_pass(1, 36) == pytest.approx(14e-3, rel=0.01)
    assert costs.of_pass(1, 2) >= costs.of_pass(1, 1)
    for _ in range(3):
        costs.add(PASS, 1, 11, 7.5e-3)
    assert costs.of_pass(1, 11) == 7.5e-3 and costs.of_pass(1, 8) <= 7.5e-3, "often enough timed to be believed"


def test_the_first_steps_are_of_known_sizes_and_plain_ones_are_timed_now_and_then() -> None:
    """Drafts that pay leave none to time, and a larger tree's time in place of theirs makes every source seem to pay."""
    costs, plain = Costs(), []
    assert costs.tree_due(8) and not costs.plain_due(8), "the first step drafts"
    for number in range(300):
        due = costs.plain_due(8)
        if due:
            plain.append(number)
        costs.add(PASS, 8, 1 if due else 2, 5e-3 if due else 6e-3)
    assert plain == [2, 3, 104, 205] and not costs.tree_due(8)
    assert costs.of_pass(8, 1) == costs.of_pass(15, 1) == 5e-3 and costs.of_pass(8, 2) == 6e-3
    assert costs.tree_due(7) and costs.tree_due(16) and not costs.tree_due(15), "by octaves"


def test_drafts_cost_what_those_of_other_depths_and_of_about_as_many_rows_do() -> None:
    costs = Costs()
    assert costs.of_part("0", 4, 3) is None
    costs.add("0", 4, 5, 4e-3)
    costs.add("0", 4, 1, 2e-3)
    assert [costs.of_part("0", 4, depths) for depths in (1, 3, 5)] == pytest.approx([2e-3, 3e-3, 4e-3])
    costs.add("2", 1, 1, 2e-3)
    costs.add("2", 1, 2, 2.001e-3)
    assert costs.of_part("2", 1, 10) == pytest.approx(2.001e-3 * 2), "twice as many take a quarter more at least"
    assert costs.of_part("0", 6, 5) == 4e-3 and costs.of_part("0", 8, 5) is None and costs.of_part("1", 4, 5) is None


def test_costs_of_one_batch_size_inform_others() -> None:
    """Positions determine the cost, here 8 ms and a third of one each; other batch sizes share what was measured."""
    costs = Costs()
    for rows, nodes in ((8, 1), (8, 12), (1, 12)):
        costs.add(PASS, rows, nodes, 8e-3 + rows * nodes / 3e3)
    for rows, nodes in ((3, 1), (7, 1), (5, 16), (4, 10)):
        assert costs.of_pass(rows, nodes) == pytest.approx(8e-3 + rows * nodes / 3e3, rel=0.1), (rows, nodes)


def test_other_lengths_cost_what_the_nearest_do_until_they_are_timed() -> None:
    assert CostModel().at(100) is not CostModel().at(257) and CostModel().at(257).tree_due(1)
    known = CostModel()
    short = known.at(30)
    assert short is known.at(256)
    for nodes, seconds in ((1, 4e-3), (12, 8e-3)) * 2:
        short.add(PASS, 1, nodes, seconds)
    short.add("host", 1, 1, 1e-3)
    long = known.at(5000)
    assert not long.tree_due(1) and not long.plain_due(1) and long.of_pass(1, 12) == 8e-3 and long.of_part("host", 1, 1) == 1e-3
    for _ in range(6):
        long.add(PASS, 1, 12, 60e-3)
    assert long.of_pass(1, 12) == 60e-3 and known.at(6000).of_pass(1, 12) == 60e-3 and known.at(200).of_pass(1, 12) == 8e-3


def test_times_of_eager_passes_do_not_count_for_captured_ones() -> None:
    costs = CostModel()
    costs.at(9).add(PASS, 1, 1, 9e-3)
    assert costs.at(9, "captured").tree_due(1), "captured passes are faster"
    costs.at(9, "captured").add(PASS, 1, 1, 4e-3)
    assert costs.at(9000, "captured").of_pass(1, 1) == 4e-3 and costs.at(9).of_pass(1, 1) == 9e-3


def pools(*probs: float) -> list[Pool]:
    pool = Pool(0)
    for token, prob in enumerate(probs):
        pool.add(0, 0, token, math.log(prob), prob)
    return [pool]


def chosen(draft_pools: list[Pool], curve: list[tuple[int, float]], remaining: list[int] | None = None, queued: bool = False) -> int:
    costs, rows = Costs(), len(draft_pools)
    for nodes, seconds in curve * 3:
        costs.add(PASS, rows, nodes, seconds)
    asked = Rows([0] * rows, remaining or [9] * rows, [*range(rows)], queued=queued)
    return Policy().choose(Draft(asked, costs, draft_pools)).size


def test_the_size_is_the_one_with_the_most_tokens_a_second() -> None:
    likely, unlikely = pools(0.6, 0.2, 0.1), pools(0.02, 0.01)
    dear, cheap = [(1, 1.0), (2, 2.0), (3, 3.0)], [(1, 1.0), (64, 1.05)]
    assert chosen(likely, cheap) == 4 and chosen(likely, dear) == 1
    assert chosen(likely, [(1, 1.0), (2, 1.1), (3, 1.9)]) == 2
    assert chosen(unlikely, cheap) == 3 and chosen(unlikely, [(1, 1.0), (2, 1.1)]) == 1
    assert chosen([*likely, *unlikely], cheap) == 4, "rows share one size"


def test_a_batch_is_as_fast_as_its_slowest_rows() -> None:
    """A gain of one row while others lag is worth little, unless another sequence waits for its row."""
    fast, slow, curve = pools(0.99), pools(0.01), [(1, 1.0), (2, 1.3)]
    assert chosen([*fast, *slow], curve) == 1 and chosen([*fast, *slow], curve, queued=True) == 2
    assert chosen([*fast, *slow], curve, remaining=[90, 9]) == 2, "the row that has most to write"
    assert chosen([*fast, *fast], curve) == 2 and chosen([*slow, *slow], curve, queued=True) == 1


def learned() -> Acceptance:
    """Overconfident by a factor of three, with a good second depth."""
    acceptance = Acceptance()
    for number in range(60):
        pool = Pool(1)
        first = pool.add("heads", 0, 2, math.log(0.9), 0.9)
        second = pool.add("heads", first, 3, math.log(0.3), 0.3)
        hit = number % 3 == 0
        accepted = {0: 2, first: 3, second: 9} if hit else {0: 7}
        acceptance.learn(pool, "heads", 0, 2, accepted)
    return acceptance


def test_it_survives_its_file() -> None:
    before = learned()
    after = Acceptance.from_json(json.loads(json.dumps(before.to_json())))
    for depth, score in ((0, math.log(0.9)), (1, math.log(0.3)), (3, -1.0)):
        assert after.prob(5, depth, score) == pytest.approx(before.table(depth).prob(score), abs=0.01)
    assert after.prob(5, 0, math.log(0.9)) < 0.6, "not what the score says"
    assert sum(after.levels, []) == pytest.approx(sum(before.levels, []), abs=1e-3)
    assert after.texts.keys() == {5}, "nothing of single texts is kept"


def test_heads_start_from_what_their_evaluation_measured(tmp_path: Path) -> None:
    of, model = heads("llama", "eagle3"), tiny("llama")
    found = evaluate(of.drafter, [whole(one.tolist()) for one in prompts((9, 5))], Eval(max_new_tokens=12, temperature=0.0), 0)
    assert not found["acceptance"]["sampled"] and len(found["acceptance"]["calibration"]) >= of.drafter.depth
    assert any(sum(table["trials"]) > 3 for table in found["acceptance"]["calibration"])
    stored: dict[str, Any] = {"sampled": False, **learned().to_json()}
    of.drafter.save_pretrained(tmp_path / "heads", extra={"acceptance": stored})
    loaded = headstart.load(tmp_path / "heads", backbone=model)
    (source,) = loaded.engine(True).policy.sources
    assert source.by_mode[False].prob(0, 0, math.log(0.9)) < 0.6 < 0.8 < source.by_mode[True].prob(0, 0, math.log(0.9))
    rows = {"input_ids": prompts((9,))[0][None]}
    assert torch.equal(say(loaded, rows, max_new_tokens=20, do_sample=False), say(of, rows, max_new_tokens=20, do_sample=False))
    of.drafter.save_pretrained(tmp_path / "none")
    assert headstart.load(tmp_path / "none", backbone=model).measured == {}


@pytest.mark.parametrize("damaged", [{}, *({"sampled": False, "levels": levels, "calibration": []} for levels in ([[2.0]], 3))])
def test_damaged_results_are_refused_by_name(tmp_path: Path, damaged: dict[str, Any]) -> None:
    heads("llama", "medusa").drafter.save_pretrained(tmp_path / "heads", extra={"acceptance": damaged})
    with pytest.raises(UserError, match=f"provenance.acceptance of {METADATA} is damaged"):
        headstart.load(tmp_path / "heads", backbone=backbone("llama"))
