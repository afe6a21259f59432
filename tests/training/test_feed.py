"""The order of the data: unchanged when a stopped run resumes on the same or another number of processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from forked import Forked
from small_run import make_recipe, read_log

from headstart.cli.train import main

EAGLE = {"kind": "eagle3", "depth": 2}


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def test_one_process_goes_on_as_two_with_the_same_data(tmp_path: Path) -> None:
    """Packed, across the end of an epoch: the second half reads the same rows, split between two processes."""
    packed = {"data": {"packing": True}, "train": {"batch_size": 5}, "eval": {"prompts": 1}, "save": {"every": 6, "keep": 3}}
    recipe = make_recipe(tmp_path, drafter=EAGLE, **packed)
    assert main([str(recipe), f"save.dir={tmp_path}/one"]) == 0
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "state" / "step-00000012")
    output = tmp_path / "said.txt"
    assert Forked(2, [str(recipe), f"save.dir={tmp_path}/two"], output).wait() == 0, output.read_text()[-3000:]
    assert "2 processes on cpu" in output.read_text() and "resuming from" in output.read_text()
    one, two = ([line for line in read_log(tmp_path / name) if "loss" in line] for name in ("one", "two"))
    assert [line["step"] for line in two] == list(range(1, 13)) and two[:6] == one[:6] and two[6:] != one[6:]
    assert [line["tokens"] for line in two] == [line["tokens"] for line in one]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=1e-4)


def test_other_samples_are_refused_on_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path, eval={"prompts": 1})
    assert main([str(recipe), "train.steps=2"]) == 0
    rows = (tmp_path / "text.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "text.jsonl").write_text("".join([*rows[1:], rows[0]]))  # the same rows in another order
    assert main([str(recipe), "train.steps=4"]) == 2
    error = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert "step-00000002 was trained on other samples (hash" in error and "text.jsonl or the tokenizer have changed; restore them" in error
    (tmp_path / "text.jsonl").write_text("".join(rows))
    assert main([str(recipe), "train.steps=4"]) == 0
