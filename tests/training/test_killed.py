"""A run killed at any time, while reading, training or saving, resumes to the weights of an undisturbed run; a full disk costs one line."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from safetensors import SafetensorError
from small_run import make_recipe, read_log

from headstart.cli.train import main
from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.support.errors import UserError
from headstart.training.run import checkpoint

STEPS, MOMENTS = 30, 5
WEIGHTS = "model.safetensors"


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return make_recipe(
        tmp_path,
        drafter={"kind": "eagle3", "depth": 2, "draft_vocab_size": 40},
        train={"steps": STEPS, "micro_batch": 2, "ema_decay": 0.5, "optimizer": "muon"},
        save={"every": 1},
        eval={"every": 10, "prompts": 1},
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_ten_times(recipe: Path, tmp_path: Path, processes: int) -> None:
    """Five kills on one process, five on two. Every step is saved, so many kills interrupt the writing of a file."""
    args = [str(recipe)]
    start = time.monotonic()
    assert Forked(processes, [*args, f"save.dir={tmp_path}/whole"], tmp_path / "said").wait() == 0
    seconds, draw, round, killed = time.monotonic() - start, random.Random(processes), 0, 0
    backbone = load_backbone(str(tmp_path / "backbone"), device="cpu")
    while killed < MOMENTS:
        out = tmp_path / str(round)
        command = [*args, f"save.dir={out}"]
        run = Forked(processes, command, tmp_path / f"{round}.txt")
        time.sleep(draw.uniform(0.1, 0.5) * seconds)
        if run.kill():
            killed += 1
        else:  # the run had ended: start another one
            round += 1
        if (out / "headstart.json").exists():
            load_drafter(out, backbone)
    assert Forked(processes, command, tmp_path / f"{round}.txt").wait() == 0
    whole = numbers(tmp_path / "whole")
    for out in (tmp_path / str(i) for i in range(round + 1) if (tmp_path / str(i) / "headstart.json").exists()):
        assert (out / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()
        assert numbers(out) == whole and len(whole) == STEPS + 4
        assert not list(out.rglob(".*"))


def numbers(out: Path) -> list[dict[str, Any]]:
    """The log without timings and without the recipe, which names the folder."""
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in read_log(out) if "recipe" not in line]


def test_a_full_disk(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The safetensors library raises its own error for it; test_faults.py has the system's, at every operation."""
    out = tmp_path / "out"
    assert main([str(recipe), "train.steps=3", "train.schedule=constant"]) == 0

    def fail(*args: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fail)
        assert main([str(recipe), "train.steps=5", "train.schedule=constant"]) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "step 4 could not be saved" in error and "No space left on device" in error and "step-00000003" in error
    assert sorted(path.name for path in (out / "state").iterdir()) == ["step-00000002", "step-00000003"]
    load_drafter(out, load_backbone(str(tmp_path / "backbone"), device="cpu"))
    assert main([str(recipe), "train.steps=5", "train.schedule=constant"]) == 0
    assert main([str(recipe), "train.steps=5", "train.schedule=constant", f"save.dir={tmp_path}/whole"]) == 0
    assert (out / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


def test_a_log_that_cannot_be_written(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(recipe), "train.steps=1"]) == 0
    from headstart.training.log.log import Log
    from headstart.training.recipe.recipe import load_recipe

    log = Log(load_recipe(recipe), 9, 1, True)
    log.file.close()
    log.file = open("/dev/full", "w")
    with pytest.raises(UserError, match="/dev/full cannot be written: .*No space left on device"):
        log.line(2, {"tau": 1.0, "acceptance_per_depth": []})
