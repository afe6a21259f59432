"""The last line of defence: whatever leaves a command is one line and a status, and an unforeseen error keeps its traceback in a file."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headstart.cli.failures import guarded
from headstart.support.errors import UserError


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


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
    for folder, expected in ((lambda: None, cache), (lambda: tmp_path, tmp_path)):
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
