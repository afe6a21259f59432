"""Processes that train, forked from this one: libraries are imported already, so starting several takes no time."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from accelerate.state import AcceleratorState

from headstart.cli.train import main


class Forked:
    """``count`` processes that know of each other, each of them the command with these arguments; what they say goes to ``said``."""

    def __init__(self, count: int, arguments: list[str], said: Path, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment}
        ranked = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)} if count > 1 else {}
        self.running: list[int] = []
        for rank in range(count):
            pid = os.fork()
            if not pid:
                _become(arguments, said, {**shared, **ranked, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {})})
            self.running.append(pid)

    def wait(self, seconds: float = 100) -> int:
        """The first exit status that is not 0 (minus the signal); ends those that take too long."""
        end, worst = time.monotonic() + seconds, 0
        while self.running:
            pid, status = os.waitpid(self.running[0], os.WNOHANG)
            if pid:
                worst = worst or os.waitstatus_to_exitcode(status)
                self.running.pop(0)
            elif time.monotonic() > end or worst:
                self.kill()
                raise AssertionError(f"ended after {seconds} s, or since another one failed with {worst}")
            else:
                time.sleep(0.01)
        return worst

    def kill(self) -> bool:
        """At once, as a power cut would; whether some of them were running still."""
        for pid in self.running:
            os.kill(pid, signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.running]
        self.running = []
        return -signal.SIGKILL in ends


def _become(arguments: list[str], said: Path, environment: dict[str, str]) -> None:
    """Never returns to the test."""
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        import sys

        sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
        os.environ.update(environment)
        AcceleratorState._reset_state(True)
        status = main(arguments)
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)
