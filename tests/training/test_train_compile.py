"""``train.compile``: the same losses, and one line where torch cannot compile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_run import make_recipe, read_log

from headstart.cli.train import main
from headstart.support.devices import not_compilable

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def losses(recipe: Path, out: Path, *changes: str) -> list[float]:
    assert main([str(recipe), f"save.dir={out}", *changes]) == 0
    return [line["loss"] for line in read_log(out) if "loss" in line]


@pytest.mark.slow
@pytest.mark.skipif(not_compilable(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_a_compiled_objective_gives_the_same_losses(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, train={"steps": 4}, eval={"every": 0, "prompts": 1, "max_new_tokens": 4})
    plain, compiled = (losses(recipe, tmp_path / str(on), f"train.compile={on}") for on in ("false", "true"))
    assert compiled == pytest.approx(plain, rel=1e-4) and len(plain) == 4


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main([str(make_recipe(tmp_path)), f"save.dir={tmp_path}/out", "train.compile=true"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "train.compile=true: torch.compile needs a C++ compiler (no-such-compiler is missing)" in error
    assert error.endswith("or set train.compile=false")
    assert not list((tmp_path / "out").glob("*.safetensors"))
