"""Training processes forked from this one: libraries are already imported, so starting several takes no time."""

import faulthandler
import os
import signal
import socket
import threading
import time
from pathlib import Path

from accelerate.state import AcceleratorState
from tqdm import tqdm

from headstart.cli.train import main

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
