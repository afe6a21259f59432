"""A copy of the process that works beside it: it ends by itself, holds no file of the process, and is not made where that fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.inference.compiled import beside

pytestmark = pytest.mark.skipif(os.name != "posix" or not Path("/proc/self/fd").exists(), reason="the process can be copied on Linux alone")


def ended(work: Callable[[], object]) -> float:
    """Seconds until a copy has ended that does this."""
    began, copy = time.monotonic(), beside.Copy.doing(work)
    assert copy is not None and time.monotonic() - began < 2, "this process goes on"
    while copy.works:
        time.sleep(0.02)
    return time.monotonic() - began


def test_it_works_on_what_is_in_memory_and_holds_no_file(tmp_path: Path) -> None:
    found, memory = tmp_path / "found", [1, 2]
    with (tmp_path / "held").open("w"):
        assert ended(lambda: (memory.append(3), found.write_text(f"{memory} {sorted(os.listdir('/proc/self/fd'))}"))) < 60
    assert found.read_text() == "[1, 2, 3] ['0', '1', '2', '3']" and memory == [1, 2], "3 is the listing's own"


def test_its_niceness_counts_and_ctrl_c_does_not_reach_it(tmp_path: Path) -> None:
    """Linux shares a CPU among sessions before it looks at niceness (autogroups)."""
    found, nice = tmp_path / "found", os.nice(0)
    ended(lambda: found.write_text(f"{os.nice(0)} {os.getsid(0)} {os.getpgid(0)}"))
    assert found.read_text().split()[:2] == [str(max(nice, beside.NICENESS)), str(os.getsid(0))]
    assert found.read_text().split()[2] != str(os.getpgid(0))


def test_it_ends_with_an_error_and_after_a_time(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(beside, "LONGEST", 1)
    assert ended(lambda: 1 / 0) < 60 and 0.9 < ended(lambda: time.sleep(600)) < 60
    assert capfd.readouterr() == ("", ""), "it prints nothing"


def test_they_take_turns() -> None:
    copy = beside.Copy.doing(lambda: time.sleep(0.5))
    assert copy is not None and beside.Copy.any_works()
    while copy.works:
        time.sleep(0.02)
    assert not beside.Copy.any_works()


def test_somebody_else_may_wait_for_it() -> None:
    copy = beside.Copy.doing(lambda: None)
    assert copy is not None
    assert copy._process is not None
    os.waitpid(copy._process, 0)
    assert not copy.works


def test_where_there_is_no_room_none_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(beside.os, "fork", full)
    assert beside.Copy.doing(lambda: None) is None
