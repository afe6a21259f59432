"""What drafts were worth in training's evaluation is kept in the checkpoint, and decoding starts from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import backbone, heads, prompts, say, tiny

import headstart
from headstart.heads.card import METADATA
from headstart.inference.acceptance import Acceptance
from headstart.inference.engine.tree import Pool
from headstart.support.errors import UserError
from headstart.training.data.samples import whole
from headstart.training.evaluation import evaluate
from headstart.training.recipe.recipe import Eval


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
