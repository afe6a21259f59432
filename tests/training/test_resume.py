"""A killed run resumes to the weights of an undisturbed one, bit for bit; what cannot be resumed is refused."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from errors import error_of
from small_run import Forked, make_recipe, numbers, read_log, train_once

from headstart.cli.train import main

STEPS, DEATH = 20, 9
MICRO_BATCHES = 3
"""Forward passes per step."""
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and in ``out`` the undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = make_recipe(
        folder, drafter={"kind": "tests.helpers.dying", "depth": 2, "draft_vocab_size": 40},
        train={"steps": STEPS, "batch_size": 2 * MICRO_BATCHES, "micro_batch": 2}, save={"every": 3, "keep": 3}, log={"every": 2},
        eval={"every": 10},
    )  # fmt: skip
    train_once(recipe)
    assert [state.name for state in states(folder / "out")] == ["step-00000015", "step-00000018", "step-00000020"]
    return folder


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole / "out", tmp_path / "out"))


def states(out: Path) -> list[Path]:
    return sorted((out / "state").iterdir())


def recipe_for(whole: Path, out: Path, *changes: str) -> list[str]:
    return [str(whole / "recipe.yaml"), f"save.dir={out}", *changes]


@pytest.mark.parametrize(
    ("number", "status", "saved"), [(signal.SIGKILL, -signal.SIGKILL, 6), (signal.SIGTERM, 128 + signal.SIGTERM, DEATH)], ids=str
)
def test_killed_and_resumed_is_the_same_bit_for_bit(whole: Path, tmp_path: Path, number: signal.Signals, status: int, saved: int) -> None:
    """Killed in step 9: SIGKILL loses everything after the state of step 6; SIGTERM lets the step finish and saves it."""
    out = tmp_path / "out"
    forward = str((DEATH - 1) * MICRO_BATCHES + 2)
    said, fatal = tmp_path / "said", {"HEADSTART_TEST_SIGNAL": str(int(number)), "HEADSTART_TEST_FORWARD": forward}
    assert Forked(1, recipe_for(whole, out), said, **fatal).wait() == status, said.read_text()[-3000:]
    assert states(out)[-1].name == f"step-{saved:08d}"
    assert number == signal.SIGKILL or f"stopped by a signal after step {DEATH} of {STEPS}" in said.read_text()
    with (out / "log.jsonl").open("a") as log:
        log.write('{"step": 19, "loss": 1.0}\n{"step": 3')  # a line of a later step, and one torn by the kill
    assert main(recipe_for(whole, out)) == 0
    assert (out / WEIGHTS).read_bytes() == (whole / "out" / WEIGHTS).read_bytes()
    assert numbers(out) == numbers(whole / "out")
    assert not [path for path in (out / "state").iterdir() if path.name.startswith(".")]


def test_the_one_before_is_taken_when_the_newest_is_damaged(whole: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = states(out)[-1] / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    (out / WEIGHTS).unlink()
    assert main(recipe_for(whole, out)) == 0
    output = capsys.readouterr().err
    assert "step-00000020 is damaged" in output and "resuming from" in output and "step-00000018" in output
    assert (out / WEIGHTS).read_bytes() == (whole / "out" / WEIGHTS).read_bytes()
    assert numbers(out) == numbers(whole / "out")


def test_refused_when_every_state_is_damaged(whole: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = states(out)
    (first / "state.json").write_text("{")
    (second / "tensors.safetensors").unlink()
    (third / "state.json").write_text(json.dumps({"sha256": "0"}))
    message = error_of(capsys, "train", *recipe_for(whole, out))
    assert message.startswith("error: ") and str(first) in message and "state.json is not JSON" in message and "delete" in message


def test_a_state_that_was_changed_is_damaged(whole: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for state, (key, value) in zip(states(out), (("heads", {}), ("tokens", None), ("step", -1)), strict=True):
        content = json.loads((state / "state.json").read_text())
        (state / "state.json").write_text(json.dumps({**content, key: value}))
    assert main(recipe_for(whole, out)) == 2
    message = capsys.readouterr().err
    assert message.count("state.json is not as it was written") == 3 and "Traceback" not in message


def test_a_state_of_another_version_is_refused(whole: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for state in states(out):
        content = json.loads((state / "state.json").read_text())
        del content["format"]
        (state / "state.json").write_text(json.dumps(content))
    error = error_of(capsys, "train", *recipe_for(whole, out, f"train.steps={STEPS + 4}"))
    assert "step-00000020 was saved by another version of Headstart (format None, this one reads 4)" in error


def test_another_recipe_is_refused_by_its_keys(whole: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(
        capsys, "train", *recipe_for(whole, out, "train.lr=0.5", "train.ema_decay=0.5", "seed=8", "log.every=1", f"train.steps={STEPS + 1}")
    )
    assert "seed (was 7, now 8)" in message and "train.lr (was 0.003, now 0.5)" in message
    assert "train.ema_decay (was None, now 0.5)" in message
    assert not any(key in message for key in ("log.every", "train.steps", "save.dir (was"))
    assert "save.resume=true" in error_of(capsys, "train", *recipe_for(whole, out, "save.resume=false"))


def test_a_finished_run_can_be_made_longer(whole: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(recipe_for(whole, out)) == 0
    assert f"already at step {STEPS}" in capsys.readouterr().err
    assert main(recipe_for(whole, out, f"train.steps={STEPS + 3}", "train.micro_batch=null", "log.every=1")) == 0
    assert [line["step"] for line in read_log(out) if "loss" in line][-4:] == [STEPS, STEPS + 1, STEPS + 2, STEPS + 3]


def test_other_samples_are_refused_on_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path, eval={"prompts": 1})
    assert main([str(recipe), "train.steps=2"]) == 0
    rows = (tmp_path / "text.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "text.jsonl").write_text("".join([*rows[1:], rows[0]]))  # the same rows in another order
    error = error_of(capsys, "train", recipe, "train.steps=4")
    assert "step-00000002 was trained on other samples (hash" in error and "text.jsonl or the tokenizer have changed; restore them" in error
    (tmp_path / "text.jsonl").write_text("".join(rows))
    assert main([str(recipe), "train.steps=4"]) == 0
