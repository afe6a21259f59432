"""The last line of defence: whatever leaves a command is one line and a status, and an unforeseen error keeps its traceback in a file."""

import errno
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from errors import error_of
from families import say
from small_run import make_recipe
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from headstart.cli.main import Guard, main
from headstart.heads.backbone.backbone import load_backbone
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.support.errors import UserError


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


def guarded(work: Callable[[], int], folder: Path | None = None, debug: bool = False) -> int:
    with Guard(folder, debug) as guard:
        guard.status = work()
    return guard.status


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADSTART_DEBUG", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "cache" / "headstart" / "failures"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("give a folder"), 2, "error: give a folder"),
        (MemoryError(), 2, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), 2, "the accelerator is out of memory"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "the disk is full"),
        (ConnectionResetError("reset"), 2, "the connection was lost"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_is_known_is_one_line_that_says_what_to_try(
    error: BaseException, status: int, said: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(raising(error)) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0] and not cache.exists()


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("two\nlines"), RecursionError("too deep")])
def test_what_nobody_foresaw_is_logged(error: Exception, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, expected in ((None, cache), (tmp_path, tmp_path)):
        assert guarded(raising(error), folder) == 70
        (line,) = capsys.readouterr().err.splitlines()
        (log,) = expected.glob("failure-*.txt")
        assert type(error).__name__ in line and str(log) in line
        assert "Traceback" in log.read_text() and log.stat().st_mode & 0o077 == 0


def test_debug_prints_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(KeyError("x")), debug=True) == 70 and "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("HEADSTART_DEBUG", "1")
    assert guarded(raising(KeyError("x"))) == 70 and "Traceback" in capsys.readouterr().err
    assert guarded(lambda: 1) == 1


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (MemoryError(), "out of memory"),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), "the accelerator failed or was lost"),
        (RuntimeError("CUDA error: device lost"), "the accelerator failed or was lost"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "train"])
def test_an_accelerator_that_fails_in_a_forward_pass(
    command: str, error: Exception, said: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = f"save.dir={recipe.parent / type(error).__name__}"
    words = {"generate": ["generate", "--backbone", str(recipe.parent / "backbone"), "a cat"], "train": ["train", str(recipe), out]}
    with register_module_forward_pre_hook(Mock(side_effect=error)):
        status = main(words[command])
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert status == (2 if said == "out of memory" else 70) and len(errors) == 1 and said in errors[0]


def test_what_the_memory_cannot_hold_is_refused_before_anything_is_computed(recipe: Path) -> None:
    ids_BT: Tensor = torch.ones(1 << 22, 1, dtype=torch.long)
    on = SpeculativeModel(load_backbone(str(recipe.parent / "backbone")))
    many = {"tree": TreeShape(4096, 4), "max_new_tokens": 4}
    line = "4194304 sequences of 1 tokens with trees of 4096 nodes need at least .*; lower the batch size"
    with register_module_forward_pre_hook(lambda *of: pytest.fail("computed")):
        with pytest.raises(UserError, match=line):
            say(on, {"input_ids": ids_BT}, **many)
        with pytest.raises(pytest.fail.Exception, match="computed"):  # one sequence at a time fits
            say(on, {"input_ids": ids_BT[:9]}, **many, batch_size=1)


def test_changes_of_a_recipe_stand_before_options_or_after_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "recipes/quickstart/eagle3.yaml", "--json", str(tmp_path / "plan.json")]
    for words in (["train.steps=0", *command[2:]], [*command[2:], "train.steps=0"]):
        assert "train.steps" in error_of(capsys, *command[:2], *words)
    for unknown in ("--jsno", "x"):
        with pytest.raises(SystemExit):
            main([*command, unknown, "train.steps=1"])
        assert f"error: unrecognized arguments: {unknown} (see" in capsys.readouterr().err
