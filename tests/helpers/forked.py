"""Training processes forked from this one: libraries are already imported, so starting several takes no time."""

import builtins
import errno
import faulthandler
import io
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from tqdm import tqdm

from headstart.cli.train import main
from headstart.heads import card
from headstart.training.run import checkpoint as run_checkpoint

SECONDS, GRACE = 100, 10  # how long a run may take, and how long the others may once one has failed


class Forked:
    """``count`` processes of one group, each running the command with these arguments; their output goes to ``log``."""

    def __init__(self, count: int, arguments: list[str], log: Path, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment}
        ranked = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)} if count > 1 else {}
        self.running: list[int] = []
        self.log = log
        for rank in range(count):
            pid = os.fork()
            if not pid:
                _become(arguments, log, {**shared, **ranked, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {})})
            self.running.append(pid)

    def wait(self, grace: float = GRACE) -> int:
        """The first non-zero exit status (minus the signal); kills those that do not end after a failure or in time."""
        end, worst = time.monotonic() + SECONDS, 0
        while self.running and time.monotonic() < end:
            for pid in list(self.running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.running.remove(pid)
                if ended and status and not worst:
                    worst, end = os.waitstatus_to_exitcode(status), min(end, time.monotonic() + grace)
            time.sleep(0.01)
        if self.running:
            why = f"another one failed with {worst}" if worst else f"it took more than {SECONDS} s"
            self.kill()
            raise AssertionError(f"killed, since {why}:\n{self.log.read_text()[-10_000:]}")
        return worst

    def kill(self) -> bool:
        """Kill all of them with SIGKILL, as a power cut would; True if any was still running."""
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.running]
        self.running = []
        return -signal.SIGKILL in ends


def _become(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    """Run the command in the forked process; never returns to the test."""
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        import sys

        sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
        os.environ.update(environment)
        faulthandler.dump_traceback_later(SECONDS - 5, file=sys.stderr)  # where a run hangs is in its log when it is killed
        AcceleratorState._reset_state(True)
        tqdm.set_lock(threading.RLock())  # the inherited one is shared: a process that is killed while it holds it would stop all others
        status = main(arguments)
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


# A file system that fails: the n-th operation on files below a folder raises, or ends the process as a kill would.

PATHS = ("replace", "rename", "mkdir", "rmdir", "unlink")
"""Functions of `os` that take a path; `pathlib` and `shutil` call them."""


class Faulty:
    """Counts the operations and calls ``fail`` at number ``at`` (from 1), and at all later ones too if ``for_good``."""

    def __init__(self, folder: Path, at: int, fail: Callable[[], None], for_good: bool) -> None:
        self.folder, self.at, self.fail, self.for_good = str(folder), at, fail, for_good
        self.count = 0
        self.seen: list[str] = []

    def note(self, name: str) -> None:
        self.count += 1
        self.seen.append(name)
        if self.count == self.at or (self.for_good and self.count > self.at):
            self.fail()

    def concerns(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and os.path.abspath(path).startswith(self.folder)

    def of_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if self.concerns(path):
                self.note(f"{name} {Path(path).name}")
            return real(path, *args, **options)

        return call

    def fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(handle: int) -> None:
            self.note("fsync")
            real(handle)

        return call

    def opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            file = real(path, mode, *args, **options)
            if self.concerns(path) and set(mode) & set("wax+"):
                self.note(f"open {Path(path).name}")
                write = file.write

                def writing(content: Any) -> Any:
                    self.note(f"write {Path(path).name}")
                    return write(content)

                file.write = writing
            return file

        return call

    def saved(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """The safetensors library writes outside of Python; a fault leaves half of the file."""

        def call(tensors: Any, path: Path, *args: Any, **options: Any) -> Any:
            real(tensors, path, *args, **options)
            content = Path(path).read_bytes()
            os.truncate(path, len(content) // 2)
            self.note(f"save_file {Path(path).name}")
            with open(path, "r+b") as file:
                os.write(file.fileno(), content)
            return None

        return call


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only() -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def broken_disk() -> None:
    raise OSError(errno.EIO, "Input/output error")


def killed() -> None:
    os._exit(9)


@contextmanager
def faults(folder: Path, at: int, fail: Callable[[], None] = broken_disk, for_good: bool = False) -> Iterator[Faulty]:
    """In the block, the ``at``-th operation below ``folder`` fails (0: none; they are only counted)."""
    faulty = Faulty(folder, at, fail, for_good)
    with pytest.MonkeyPatch.context() as patch:
        for name in PATHS:
            patch.setattr(os, name, faulty.of_path(name, getattr(os, name)))
        patch.setattr(os, "fsync", faulty.fsync(os.fsync))
        opened = faulty.opened(io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        for module in (card, run_checkpoint):
            patch.setattr(module, "save_file", faulty.saved(module.save_file))
        yield faulty
