"""User-defined drafters, one file each (tests/helpers/strangers): trained by a recipe, saved, loaded, and decoded losslessly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import STRANGERS, left_padded, prompts, say
from small_run import make_recipe, read_log

from headstart.cli.main import main as headstart
from headstart.cli.train import main
from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.checkpoint import load_drafter
from headstart.inference.generate import SpeculativeModel

LOSSES = {"tests.helpers.strangers.eagle1": {"terms": {"features": 1.0, "kl": 0.1}}, "tests.helpers.strangers.block": {}}
DEPTHS = {"tests.helpers.strangers.eagle1": 1, "tests.helpers.strangers.block": 3}
LONGEST = 120


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("kind", STRANGERS)
def test_a_strangers_drafter_trains_and_decodes(kind: str, tmp_path: Path) -> None:
    recipe = make_recipe(
        tmp_path,
        drafter={"kind": kind, "depth": DEPTHS[kind]},
        objective=LOSSES[kind],
        train={"steps": 40, "schedule": "constant"},
        log={"every": 10},
    )
    assert main([str(recipe)]) == 0
    lines = [line for line in read_log(tmp_path / "out") if "loss" in line]
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"] and lines[-1]["alpha"][0] > lines[0]["alpha"][0]
    on = load_backbone(str(tmp_path / "backbone"), device="cpu")
    drafter = load_drafter(tmp_path / "out", on)
    assert type(drafter).__module__ == kind and len(lines[0]["accuracy"]) == drafter.trained_depth
    rows, heads = left_padded(prompts((9, 4))), SpeculativeModel(on, drafter)
    plain = say(heads, rows, speculate=False, max_new_tokens=24, do_sample=False)
    assert torch.equal(say(heads, rows, max_new_tokens=24, do_sample=False), plain)


@pytest.mark.parametrize("kind", STRANGERS)
def test_memory_is_planned_for_them(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path, drafter={"kind": kind, "depth": 2}, objective=LOSSES[kind])
    assert headstart(["plan", str(recipe), "--memory", "0.4"]) == 0  # less than torch takes, so it looks for no larger batch that fits
    out = capsys.readouterr().out
    assert "drafter activations" in out and "does not fit: 50" in out


def test_they_are_short() -> None:
    for file in (Path(__file__).parents[1] / "helpers" / "strangers").glob("*.py"):
        assert len(file.read_text().splitlines()) < LONGEST, file.name
