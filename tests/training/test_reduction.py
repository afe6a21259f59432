"""A step does not depend on its split into micro-batches or processes, for terms and weights that could depend on the split.

tests/training/test_objective.py does the same for packing and padding, where the sums are available.
"""

from pathlib import Path

import pytest
from forked import Forked
from small_run import make_recipe, read_log

from headstart.cli.train import main

WANTED = {"terms": {"ce": 0.1, "lk": 1.0}, "depth_weights": "expected", "chunk_size": 50}
DRAFTER = {"kind": "eagle3", "depth": 3, "draft_vocab_size": 40}
TRAIN = {"steps": 4, "batch_size": 5, "optimizer": "muon", "ema_decay": 0.9}
pytestmark = pytest.mark.usefixtures("on_the_cpu")


def test_neither_accumulation_nor_the_number_of_processes_changes_a_step(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, objective=WANTED, drafter=DRAFTER, train=TRAIN, eval={"prompts": 1})
    assert main([str(recipe), f"save.dir={tmp_path}/whole"]) == 0
    assert main([str(recipe), f"save.dir={tmp_path}/pieces", "train.micro_batch=1", "objective.chunk_size=7"]) == 0
    output = tmp_path / "said"
    assert Forked(2, [str(recipe), f"save.dir={tmp_path}/two"], output).wait() == 0 and "2 processes on cpu" in output.read_text()
    whole, *others = ([line for line in read_log(tmp_path / name) if "loss" in line] for name in ("whole", "pieces", "two"))
    assert len(whole) == TRAIN["steps"]
    for other in others:
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in other] == pytest.approx([line[key] for line in whole], rel=1e-4)
