"""No evaluation costs a training: heads and state are saved before it, and whatever becomes of it, the run goes on or is resumed."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from small_run import Forked, make_recipe, numbers, read_log, train_once
from watched import watched

from headstart import Drafter, load_backbone, load_recipe
from headstart.cli.main import main as headstart
from headstart.cli.train import main
from headstart.heads.checkpoint import load_drafter
from headstart.heads.eagle3 import Eagle3
from headstart.training import evaluation
from headstart.training.features.source import LiveFeatures
from headstart.training.run.log import Log
from headstart.training.setup import prepare

WEIGHTS = "medusa_lm_head.safetensors"


def provenance(out: Path) -> dict[str, Any]:
    return json.loads((out / "headstart.json").read_text())["provenance"]


def broken(*args: Any) -> Any:
    raise IndexError("index 28311552 is out of bounds")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run, which evaluates after steps 4, 8 and 12; its recipe and backbone are beside it."""
    return train_once(make_recipe(tmp_path_factory.mktemp("whole"), eval={"every": 4})) / "out"


def recipe_for(whole: Path, out: Path, *changes: str) -> list[str]:
    return [str(whole.parent / "recipe.yaml"), f"save.dir={out}", *changes]


def require_loadable(whole: Path, out: Path) -> None:
    load_drafter(out, load_backbone(str(whole.parent / "backbone"), device="cpu"))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_that_fails_is_a_warning(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, processes: int) -> None:
    out, said = tmp_path / "out", tmp_path / "said"
    command = recipe_for(whole, out)
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", broken)
        assert Forked(processes, command, said).wait() == 0
    assert said.read_text().count("warning: the evaluation at step") == 3 and "done: the heads are in" in said.read_text()
    warnings = [line for line in read_log(out) if "warning" in line]
    assert [line["step"] for line in warnings] == [4, 8, 12]
    assert "out of bounds" in warnings[0]["warning"] and "in broken\n" in warnings[0]["traceback"]
    require_loadable(whole, out)
    assert (out / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes() or processes == 2
    assert provenance(out)["tau"] is None and provenance(out)["steps"] == 12
    assert main(command) == 0, "the same command makes the last evaluation"
    assert "is already at step 12 of 12" in capsys.readouterr().err
    assert provenance(out)["tau"] == pytest.approx(provenance(whole)["tau"]) and read_log(out)[-1]["step"] == 12
    assert main(command) == 0 and "evaluating" not in capsys.readouterr().err, "once"


@pytest.mark.parametrize("alone", [False, True], ids=["all", "one"])
def test_one_that_fails_on_a_sharded_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """All processes decode: if all fail, the run goes on; if one does, it ends instead of waiting for hours."""
    recipe, said, real = make_recipe(tmp_path, train={"steps": 2}), tmp_path / "said", evaluation.evaluate
    monkeypatch.setattr(evaluation, "evaluate", lambda *args: broken() if not alone or os.environ["RANK"] == "1" else real(*args))
    monkeypatch.setattr(evaluation, "STEP_SECONDS", 2.0)
    start, run = time.monotonic(), Forked(2, [str(recipe), "backbone.shard=true"], said)
    if not alone:
        assert run.wait() == 0
        assert "warning: the evaluation at step 2 failed (IndexError" in said.read_text() and "done: the heads" in said.read_text()
    else:
        with pytest.raises(AssertionError, match="another process of this run has ended or does not answer"):
            assert run.wait() == 0, said.read_text()
        assert time.monotonic() - start < 60 and "in broken" in said.read_text()
    load_drafter(tmp_path / "out", load_backbone(str(tmp_path / "backbone"), device="cpu"))


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=str)
@pytest.mark.parametrize("step", [8, 12])
def test_ended_by_a_signal_it_is_made_by_the_next_start(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, step: int
) -> None:
    real, out, said = evaluation.evaluate, tmp_path / "out", tmp_path / "said"
    command = recipe_for(whole, out, "save.every=8")

    def dying(*args: Any) -> dict[str, Any]:
        if read_log(out)[-1]["step"] == step:
            os.kill(os.getpid(), number)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", dying)
        status = -number if number == signal.SIGKILL else 128 + number
        assert Forked(1, command, said).wait() == status
    assert provenance(out)["steps"] == step and provenance(out)["tau"] is None
    require_loadable(whole, out)
    if number == signal.SIGTERM:
        assert f"stopped by a signal after step {step} of 12, all saved and its evaluation is left out" in said.read_text()
    assert main(command) == 0
    assert numbers(out) == numbers(whole) and (out / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert provenance(out)["tau"] == provenance(whole)["tau"]


def test_it_ends_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(make_recipe(tmp_path)), "train.steps=1", "eval.max_seconds=1e-6", "eval.max_new_tokens=60"]) == 0
    stderr = capsys.readouterr().err
    assert "evaluating the heads on 2 prompts of up to 60 tokens, for at most 1e-06 s (eval.max_seconds)" in stderr
    assert "ended by eval.max_seconds=1e-06 after 0 of 2 prompts" in stderr and "evaluating:" in stderr
    (line,) = (line for line in read_log(tmp_path / "out") if "tau" in line)
    assert line["prompts"] == [0, 2] and line["tau"] >= 1


def test_heads_that_cannot_be_saved_do_not_cost_the_state(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault of the code that saves heads is mended, and the same command saves them without training again."""
    command = recipe_for(whole, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(Drafter, "save_pretrained", broken)
        assert main(command) == 70
    assert not (tmp_path / "out" / "headstart.json").exists()
    assert main(command) == 0 and "the heads of step 12 were not saved; they are now" in capsys.readouterr().err
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert provenance(tmp_path / "out")["tau"] == provenance(whole)["tau"]


def test_a_log_that_cannot_be_written_does_not_cost_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(tmp_path, train={"steps": 3})
    write, full = Log._write, OSError(28, "No space left on device")

    def failing(self: Log, line: dict[str, Any]) -> None:
        if line["step"] == 3:
            raise full
        write(self, line)

    with monkeypatch.context() as patch:
        patch.setattr(Log, "_write", failing)
        assert main([str(recipe)]) == 2
    assert provenance(tmp_path / "out")["steps"] == 3 and (tmp_path / "out" / "state" / "step-00000003").exists()
    assert main([str(recipe)]) == 0
    assert [line["step"] for line in read_log(tmp_path / "out") if "loss" in line] == [1, 2, 3], "the line is written by the next run"


class Wrong:
    name = "wrong"

    def log(self, *args: Any, **options: Any) -> None:
        raise ConnectionError("gone")

    finish = log


def test_neither_trackers_nor_the_terminal_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(tmp_path, train={"steps": 3})
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("headstart.training.run.log.start_trackers", lambda recipe, done, wandb_id: [Wrong()])
    with os.fdopen(writer, "w", buffering=1) as gone, monkeypatch.context() as patch:
        patch.setattr("sys.stderr", gone)
        assert main([str(recipe)]) == 0
        gone.close = lambda: None  # type: ignore[method-assign]
    assert [line["step"] for line in read_log(tmp_path / "out") if "warning" in line] == [1], "it gets no more"
    assert provenance(tmp_path / "out")["steps"] == 3


def test_start_values_are_fitted_once_for_all_processes_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(tmp_path, drafter={"kind": "eagle3", "depth": 2}, train={"steps": 1})
    fresh = prepare(load_recipe(recipe, [f"save.dir={tmp_path}/live"])).drafter
    cached = [f"cache.dir={tmp_path}/cache", "cache.dtype=exact"]
    assert isinstance(fresh, Eagle3) and "fitting start values" in capsys.readouterr().err
    live = fresh.fc.weight.clone()
    assert headstart(["cache", str(recipe), *cached]) == 0

    def once(self: Eagle3, features: Any) -> None:
        assert os.environ.get("RANK", "0") == "0", "another process fits them"
        with (tmp_path / "fitted").open("a") as file:
            file.write("once ")

    watched(monkeypatch, Eagle3, "fit_start", once)
    monkeypatch.setattr(LiveFeatures, "read", broken)
    assert Forked(2, [str(recipe), *cached, "train.lr=1e-30"], tmp_path / "said").wait() == 0, (tmp_path / "said").read_text()
    assert (tmp_path / "fitted").read_text() == "once "
    trained = load_drafter(tmp_path / "out", load_backbone(str(tmp_path / "backbone"), device="cpu"))
    assert isinstance(trained, Eagle3) and (trained.fc.weight - live).norm() < 1e-3 * live.norm()
