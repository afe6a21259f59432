"""Compiles parts of programs in several processes at a time, which end with this one, however it ends."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import headstart
from headstart.support.errors import UserError
from headstart_cpu import kernels, store
from headstart_cpu.program import Region

START = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
if os.getppid() == int(sys.argv[1]):
    from headstart_cpu.workers import main
    main()
"""
"""The program of a process that compiles."""
PART = TypeAdapter(Region | None)
"""A region, or None for the operations of ours."""
MOST = 4
"""Processes at a time: each takes a gigabyte of memory."""
USUAL = 20.0
"""Seconds that a part takes, until some have been timed."""
EVERY = 4.0
"""Seconds between lines about the progress."""


def compile_parts(regions: Sequence[Region], say: Callable[[str], object]) -> int:
    """Compile these regions and the operations of ours, if they lack; returns the number of parts. What cannot be compiled is noted.

    ``say``: is given a line at the beginning and every few seconds. Raises UserError if a process ends before its work does.
    """
    parts = [*([] if kernels.library().is_file() else [None]), *regions]
    count, start, done = min(MOST, len(os.sched_getaffinity(0)), len(parts)), time.monotonic(), list[Region | None]()
    left = iter(parts)  # each of the threads takes the next
    kernels.folder().mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max(count, 1)) as pool:
        working = {pool.submit(_hand_out, left, done) for _ in range(count)}
        while working:
            ended, working = wait(working, timeout=EVERY, return_when=FIRST_EXCEPTION)
            for worker in ended:
                worker.result()
            each = (time.monotonic() - start) / len(done) if done else USUAL / count
            if working:
                say(f"compiled {len(done)} of {len(parts)} parts, about {each * (len(parts) - len(done)):.0f} s left")
    return len(parts)


def _hand_out(left: Iterator[Region | None], done: list[Region | None]) -> None:
    """Have a process compile one part after the other until there are no more."""
    roots = Path(headstart.__file__).parents[1], Path(__file__).parents[1]
    paths = [*map(str, roots), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths))
    command = [sys.executable, "-P", "-c", START, str(os.getpid())]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=kernels.folder(), **pipes) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        for part in left:
            worker.stdin.write(f"{PART.dump_json(part).decode()}\n")
            worker.stdin.flush()
            if not (answer := worker.stdout.readline()):
                raise UserError("a process that compiles has ended before its work was done (out of memory?); run the command again")
            if answer != "done\n":
                raise UserError(f"compiled layers cannot be kept: {answer.strip()}")
            done.append(part)


def main() -> None:
    """Compile the parts that are named on standard input, one a line, and answer each with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    for line in sys.stdin:
        part = PART.validate_json(line)
        try:
            store.compile_kernels() if part is None else store.compile_part(part)
            answer = "done"
        except OSError as error:
            answer = str(error)
        print(answer, file=answers, flush=True)
