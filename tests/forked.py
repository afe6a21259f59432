"""Training processes forked from this one: libraries are already imported, so starting several takes no time."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

from accelerate.state import AcceleratorState
from tqdm import tqdm

from headstart.cli.train import main


class Forked:
    """``count`` processes of one group, each running the command with these arguments; their output goes to ``said``."""

    def __init__(self, count: int, arguments: list[str], log: Path, **environment: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment}
        ranked = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)} if count > 1 else {}
        self.running: list[int] = []
        for rank in range(count):
            pid = os.fork()
            if not pid:
                _become(arguments, log, {**shared, **ranked, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {})})
            self.running.append(pid)

    def wait(self, seconds: float = 100) -> int:
        """The first non-zero exit status (minus the signal); kills the others after a failure or a timeout."""
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
        AcceleratorState._reset_state(True)
        tqdm.set_lock(threading.RLock())   # the inherited one is shared: a process that is killed while it holds it would stop all others
        status = main(arguments)
        sys.stderr.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)
