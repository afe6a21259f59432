"""Run a command in this process, with a limit of time, and judge how it ended."""

import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from headstart.cli.main import main

STATUSES = (0, 1, 2)
"""Result, tokens that differ (bench), a user's mistake."""


class Hang(BaseException):
    """No answer within the limit."""


@dataclass(frozen=True)
class Outcome:
    status: int | None
    """None: an exception left the command."""
    out: str
    err: str
    seconds: float
    fault: str
    """Empty if the command kept the promise: a result, or one line and status 2."""


class Input(io.TextIOWrapper):
    """Standard input that holds some bytes."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")


WAITS = 6
"""Seconds of waiting per second of computing, on a machine where others compute too."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Hang after ``seconds`` of computing, or `WAITS` times as many altogether."""

    def stop(number: int, frame: object) -> None:
        raise Hang

    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, WAITS * seconds))
    before = [signal.signal(number, stop) for number, _, _ in clocks]
    for _, clock, limit in clocks:
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for (number, clock, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


def try_command(argv: Sequence[str], stdin: bytes | None = b"", seconds: float = 30) -> Outcome:
    """Run ``headstart ARGV`` here; ``stdin`` None is a closed standard input."""
    out, err, before, start = io.StringIO(), io.StringIO(), sys.stdin, time.perf_counter()
    status, problem = None, ""
    sys.stdin = None if stdin is None else Input(stdin)
    try:
        with redirect_stdout(out), redirect_stderr(err), time_limit(seconds):
            status = main(list(argv))
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except Hang:
        problem = "hang"
    except BaseException as error:
        problem = f"traceback: {type(error).__name__}: {str(error)[:100]} at {_place(error)}"
    finally:
        sys.stdin = before
    took = time.perf_counter() - start
    return Outcome(status, out.getvalue(), err.getvalue(), took, problem or judge(status, err.getvalue()))


def judge(status: int | None, err: str) -> str:
    """Say what breaks the promise; nothing if it is kept."""
    if status not in STATUSES:
        return f"status {status}: {err.strip()[-300:]}"
    lines = [line for line in err.splitlines() if line.strip()]
    if "Traceback" in err:
        return "a traceback is printed"
    errors = [line for line in lines if line.startswith("error")]
    if status == 2 and (len(errors) != 1 or lines[-1] != errors[0]):
        return f"status 2 with {len(errors)} lines of error, at last {lines[-1:]}"
    return ""


def snapshot(folder: Path) -> dict[str, bytes]:
    """The files below a folder and their contents."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if f"{os.sep}.venv{os.sep}" not in frame.filename]
    return " < ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in reversed(frames[-3:]))
