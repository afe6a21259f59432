"""Processes that compile: they end with the command that began them, however it ends, and say what fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from headstart_cpu import kernels, workers
from headstart_cpu.program import Region
from headstart_cpu.store import FILE
from needs import needs_a_compiler

import headstart
from headstart.support.errors import UserError

REGION = Region("def forward(self, x):\n    return [x + 1]", (("float32", ("rows", 4)),))
SCRIPT = f"""
from headstart_cpu import workers
from headstart_cpu.program import Region
print(workers.compile_parts([Region({REGION.text!r}, {REGION.inputs!r})], lambda line: print(line, flush=True)))
"""


def begun(cache: Path) -> subprocess.Popen[str]:
    """A process that compiles into a folder of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(Path(headstart.__file__).parents[1])}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True)


def left(cache: Path) -> list[psutil.Process]:
    """Processes of ours that compile into that folder; the compilers that they started may end later."""

    def works_there(process: psutil.Process) -> bool:
        try:
            return "headstart" in " ".join(process.cmdline()) and str(cache) in process.environ().get("XDG_CACHE_HOME", "")
        except psutil.Error:  # gone, or a zombie
            return False

    return [process for process in psutil.process_iter() if works_there(process)]


@needs_a_compiler
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_a_command_that_is_ended(end: signal.Signals, tmp_path: Path) -> None:
    with begun(tmp_path) as command:
        while len(left(tmp_path)) < 2:
            time.sleep(0.1)
        command.send_signal(end)
        command.wait()
    end_of_wait = time.monotonic() + 10
    while left(tmp_path) and time.monotonic() < end_of_wait:
        time.sleep(0.1)
    assert left(tmp_path) == []


@pytest.mark.slow
@needs_a_compiler
def test_parts_are_compiled_with_lines_about_the_progress(tmp_path: Path) -> None:
    with begun(tmp_path) as command:
        said, _ = command.communicate()
    assert said.splitlines()[-1] == "2" and "of 2 parts, about" in said and not left(tmp_path)
    folder = tmp_path / "headstart" / "compiled"
    assert len([*folder.glob("kernels-*.so")]) == 1 and [*folder.glob(f"layer-*/{FILE}")]


@needs_a_compiler
def test_a_process_that_ends_before_its_work_is_done_is_an_error_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.folder().mkdir(parents=True)
    kernels.library().touch()
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="has ended before its work was done"):
        workers.compile_parts([REGION], lambda line: None)
