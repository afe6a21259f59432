"""What other processes do while this one decodes: trace a pass in a copy of it, and compile layers in one of their own.

Tracing takes seconds and compiling a layer some 20. Both are done beside, so that decoding begins at once and a short command is not kept
waiting; what they make serves every later process. They belong to this session, since Linux shares a CPU among sessions before it looks at
niceness, and to process groups of their own, which Ctrl-C does not reach.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch

import headstart
from headstart.inference.compiled import kernels
from headstart.inference.compiled.program import Program
from headstart.inference.compiled.store import compile_missing, lacks, read_program
from headstart.support.files import locked

NICENESS = 5
"""At 10 nothing was compiled while texts followed without a pause; at 0 a text took five times as long (docs/log/2026-11.md)."""
LONGEST = 600
"""Seconds after which a copy is ended: it hangs if it needs a lock that another thread of this process held."""


class Copy:
    """A copy of this process (fork) that does some work with what is in memory here, and ends."""

    last: ClassVar[Copy | None] = None

    def __init__(self, process: int) -> None:
        self._process: int | None = process

    @staticmethod
    def doing(work: Callable[[], object]) -> Copy | None:
        """Begin it; None where a process with threads cannot be copied, or there is no room."""
        if sys.platform != "linux":
            return None
        try:
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # Python's, of the threads that the copy lacks
                process = os.fork()
        except OSError:
            return None
        if process:
            Copy.last = Copy(process)
            return Copy.last
        try:
            os.setpgid(0, 0)
            _be_nice()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LONGEST)
            nothing = os.open(os.devnull, os.O_RDWR)
            for standard in range(3):
                os.dup2(nothing, standard)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # locks and connections of this process
            torch.set_num_threads(1)
            work()
        finally:
            os._exit(0)

    @classmethod
    def any_works(cls) -> bool:
        """True while one works: they take turns, so that what was asked for first is there first."""
        return cls.last is not None and cls.last.works

    @property
    def works(self) -> bool:
        """True until it has ended."""
        if self._process is not None:
            try:
                ended = os.waitpid(self._process, os.WNOHANG) != (0, 0)
            except ChildProcessError:  # somebody else has waited for it
                ended = True
            self._process = None if ended else self._process
        return self._process is not None


def compile_beside(file: Path) -> None:
    """Have a detached process compile what the program in the file lacks; it outlives this one."""
    root = Path(headstart.__file__).parent.parent
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths))
    command = [sys.executable, "-P", "-m", "headstart.inference.compiled.beside", str(file)]
    nothing = subprocess.DEVNULL
    subprocess.Popen(command, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, process_group=0, cwd=kernels.folder())


def main(file: Path) -> None:
    """Compile one program after the other, the given one first, until none lacks anything; ends at once if another process does so."""
    _be_nice()
    with locked(kernels.folder() / "compiling.lock", "XDG_CACHE_HOME") as mine:
        while mine and (program := _lacking(file)) is not None:
            compile_missing(program)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def _lacking(first: Path) -> Program | None:
    """A program of which something is to be compiled, the oldest after the first; others may be added at any time."""
    others = sorted(kernels.folder().glob("pass-*.json"), key=lambda file: file.stat().st_mtime)
    programs = (read_program(file) for file in (first, *others))
    return next((one for one in programs if one is not None and lacks(one)), None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
