"""Faults of the machine: whatever file operation fails or is the last before a kill, what was saved loads, and the run goes on to the
weights of an undisturbed one, bit for bit. A fault costs one line."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of
from families import backbone, random_drafter
from safetensors import SafetensorError
from small_run import Forked, broken_disk, faults, full_disk, killed, make_recipe, read_log, read_only
from watched import watched

from headstart import Drafter, load_backbone
from headstart.cli.train import main
from headstart.heads import checkpoint
from headstart.heads.checkpoint import load_drafter, read_metadata
from headstart.support.errors import UserError
from headstart.support.files import PENDING, settle
from headstart.training.run import checkpoint as states
from headstart.training.run.checkpoint import find_state, read_state, write_state
from headstart.training.run.processes import LOCK, lost_process

WEIGHTS = "medusa_lm_head.safetensors"
MOST = 100
"""More file operations than any save has."""
NEVER = 77
"""Exit status of a process in which no operation had the number."""


def forked(folder: Path, at: int, fail: Callable[[], None], work: Callable[[], Any]) -> int:
    """Run ``work`` with a fault in a forked process; returns its exit status."""
    pid = os.fork()
    if not pid:
        try:
            with faults(folder, at, fail, for_good=fail is full_disk) as faulty:
                work()
            os._exit(0 if faulty.count >= at else NEVER)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class TestOneSave:
    """Every file operation of one save, over an earlier one."""

    @pytest.fixture
    def two(self, tmp_path: Path) -> tuple[Drafter, Drafter]:
        """Two drafters of the same shape; the first is saved in ``tmp_path / "heads"``."""
        first, second = (random_drafter("medusa", backbone("llama"), seed=seed, depth=2) for seed in (1, 2))
        first.save_pretrained(tmp_path / "heads", extra={"number": 1})
        return first, second

    def read(self, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
        drafter = load_drafter(folder, backbone("llama"))
        return read_metadata(folder)[1]["provenance"]["number"], drafter.tensors()

    def require_one_of(self, folder: Path, two: tuple[Drafter, Drafter]) -> int:
        number, tensors = self.read(folder)
        expected = two[number - 1].tensors()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
        return number

    @pytest.mark.parametrize("fail", [killed, *(pytest.param(fail, marks=pytest.mark.slow) for fail in (broken_disk, full_disk))])
    def test_the_checkpoint_is_the_old_or_the_new_one(self, two: tuple[Drafter, Drafter], tmp_path: Path, fail: Callable) -> None:
        numbers = []
        for at in range(1, MOST):
            folder = tmp_path / f"{at}"
            shutil.copytree(tmp_path / "heads", folder)
            status = forked(folder, at, fail, lambda folder=folder: two[1].save_pretrained(folder, extra={"number": 2}))
            numbers.append(self.require_one_of(folder, two))
            assert numbers[-1] == 2 or status
            two[1].save_pretrained(folder, extra={"number": 2})
            assert self.require_one_of(folder, two) == 2 and not (folder / PENDING).exists()
            if status == NEVER:
                break
        assert status == NEVER and numbers.count(1) > 8 and numbers.count(2) > 5, numbers
        assert fail is not killed or numbers == sorted(numbers), "once the step is done it stays done"

    def test_a_reader_finishes_the_step_or_says_that_it_cannot(self, two: tuple[Drafter, Drafter], tmp_path: Path) -> None:
        folder = tmp_path / "heads"
        step = next(at for at in range(1, MOST) if self.interrupted(two[1], folder, at))
        assert step and (folder / PENDING / "headstart.json").exists()
        with faults(folder, 1, read_only, for_good=True), pytest.raises(UserError) as refusal:
            settle(folder)
        assert str(refusal.value) == (
            f"saving {folder} was interrupted, and its new files cannot be moved out of {PENDING} (Read-only file system); "
            "run this once where the folder can be written"
        )
        assert self.require_one_of(folder, two) == 2 and not (folder / PENDING).exists()

    def interrupted(self, drafter: Drafter, folder: Path, at: int) -> bool:
        assert forked(folder, at, killed, lambda: drafter.save_pretrained(folder, extra={"number": 2})) == 9
        return (folder / PENDING).exists()

    def test_heads_saved_while_they_are_read(self, two: tuple[Drafter, Drafter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run saves between the reading of the metadata and that of the weights, and once between the check and the reading."""
        for name in ("file_hash", "load_file"):
            folder, waiting = tmp_path / name, [two[1]]
            two[0].save_pretrained(folder, extra={"number": 1})

            def save(path: Path, folder: Path = folder, waiting: list[Drafter] = waiting) -> None:
                while waiting:
                    waiting.pop().save_pretrained(folder, extra={"number": 2})

            watched(monkeypatch, checkpoint, name, save)
            assert self.require_one_of(folder, two) == 2

    @pytest.mark.parametrize("fail", [broken_disk, full_disk, killed])
    def test_the_state_of_a_run(self, tmp_path: Path, fail: Callable) -> None:
        written = {step: {"weight": torch.full((3,), float(step))} for step in (1, 2, 3)}
        for at in range(1, MOST):
            folder = tmp_path / f"{at}"
            for step in (1, 2):
                write_state(folder, step, written[step], {}, keep=2)

            status = forked(folder, at, fail, lambda folder=folder: write_state(folder, 3, written[3], {}, keep=2))
            found = find_state(folder)
            assert found is not None
            state = read_state(found)
            assert state.step in (2, 3) and torch.equal(state.tensors["weight"], written[state.step]["weight"])
            write_state(folder, 3, written[3], {}, keep=2)
            assert sorted(path.name for path in (folder / "state").iterdir()) == ["step-00000002", "step-00000003"]
            if status == NEVER:
                return
        raise AssertionError("a save has fewer operations")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    train, evaluation = {"steps": 3, "schedule": "constant", "warmup_ratio": 0.0}, {"every": 0, "prompts": 1, "max_new_tokens": 4}
    return make_recipe(tmp_path, train=train, save={"every": 1, "keep": 1}, eval=evaluation)


class TestRun:
    """A whole run, through the command."""

    def sweep(self, recipe: Path, tmp_path: Path, capsys: Any, numbers: slice) -> None:
        whole = tmp_path / "whole"
        with faults(whole, 0) as counted:
            assert main([str(recipe), f"save.dir={whole}"]) == 0
        weights = (whole / WEIGHTS).read_bytes()
        tried = range(1, counted.count + 1)[numbers]
        statuses = []
        for at in tried:
            out = tmp_path / f"out{at}"
            fail, for_good = ((broken_disk, False), (full_disk, True), (read_only, True))[at % 3]
            with faults(out, at, fail, for_good):
                statuses.append(main([str(recipe), f"save.dir={out}"]))
            lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("error", "Traceback"))]
            assert statuses[-1] in (0, 2) and len(lines) == (statuses[-1] == 2), (at, counted.seen[at - 1], lines)
            if (out / "headstart.json").exists() or (out / PENDING).exists():
                load_drafter(out, load_backbone(str(tmp_path / "backbone"), device="cpu"))
            assert main([str(recipe), f"save.dir={out}"]) == 0
            assert (out / WEIGHTS).read_bytes() == weights, (at, counted.seen[at - 1])
            assert [line["step"] for line in read_log(out) if "loss" in line] == [1, 2, 3]
            assert not [path for path in out.rglob(".*")]
        assert len(statuses) == len(tried) > 3 and 2 in statuses

    def test_some_operations(self, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.sweep(recipe, tmp_path, capsys, slice(None, None, 29))

    @pytest.mark.slow
    def test_every_operation(self, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.sweep(recipe, tmp_path, capsys, slice(None))

    def test_the_error_of_the_safetensors_library(self, recipe: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*args: Any) -> None:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        assert main([str(recipe), "train.steps=2"]) == 0
        with monkeypatch.context() as patch:
            patch.setattr(states, "save_file", full)
            line = error_of(capsys, "train", recipe)
        assert "step 3 could not be saved" in line and "No space left on device" in line and "step-00000002" in line
        assert main([str(recipe)]) == 0

    def test_a_second_run_on_the_folder_is_refused_until_the_first_is_dead(self, recipe: Path, tmp_path: Path, capsys: Any) -> None:
        out = tmp_path / "out"
        first = Forked(1, [str(recipe), f"save.dir={out}", "train.steps=100000"], tmp_path / "said")
        try:
            end = time.monotonic() + 60
            while not list(out.glob("state/step-*")) and time.monotonic() < end:
                time.sleep(0.05)
            line = error_of(capsys, "train", recipe, f"save.dir={out}")
            assert line == f"error: another run is writing to save.dir={out}; let it end or stop it, or choose another save.dir"
        finally:
            assert first.kill()
        (out / LOCK).chmod(0o600)  # it is still there
        line = error_of(capsys, "train", recipe, f"save.dir={out}", "save.resume=false")
        assert "holds an earlier run" in line, "the lock has died with its process"

    def test_a_refused_run_leaves_no_folder(self, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        error_of(capsys, "train", recipe, f"save.dir={tmp_path}/a/b", "backbone.path=/nowhere")
        assert not (tmp_path / "a").exists()
        line = error_of(capsys, "train", recipe, f"save.dir={recipe}/out")
        assert "save.dir" in line and "Not a directory" in line

    @pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
    def test_when_one_process_is_killed_the_other_ends_with_one_line(self, recipe: Path, tmp_path: Path, victim: int) -> None:
        out, said = tmp_path / "out", tmp_path / "said"
        both = Forked(2, [str(recipe), f"save.dir={out}", "train.steps=100000", "train.batch_size=4"], said)
        end = time.monotonic() + 60
        while not list(out.glob("state/step-*")) and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(both.running[victim], signal.SIGKILL)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in both.running]
        assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] == 2
        text = said.read_text()
        lines = [line for line in text.splitlines() if line.startswith("error")]
        assert "Traceback" not in text and len(lines) == 1
        assert lines[0].startswith("error (process 1): another process" if victim == 0 else "error: another process")
        assert f"goes on from what was last saved in {out}" in lines[0]
        done = int(find_state(out).name.removeprefix("step-"))  # type: ignore[union-attr]
        for folder in (out, tmp_path / "whole"):
            arguments = [str(recipe), f"save.dir={folder}", f"train.steps={done + 2}", "train.batch_size=4"]
            assert Forked(2, arguments, tmp_path / "again").wait() == 0
        assert (out / WEIGHTS).read_bytes() == (tmp_path / "whole" / WEIGHTS).read_bytes()


def test_which_errors_mean_a_lost_process(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = RuntimeError("[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:37. Check the logs")
    assert lost_process(gone, "out") is None, "of one process it means something else"
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = "another process of this run has ended or does not answer (Connection closed by peer [127.0.0.1]:37)"
    assert str(lost_process(gone, "out")).startswith(said)
    assert lost_process(torch.distributed.DistBackendError("of NCCL"), "out") is not None
    assert lost_process(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "out") is None
