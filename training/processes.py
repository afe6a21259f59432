"""Several processes on one machine's CPU, which ``accelerate launch --cpu --num_processes 2`` asks for and does not start.

For a CPU on one machine accelerate 1.15 starts a single process whatever ``--num_processes`` says (it leaves the rest to
mpirun), so a run would silently be another one than asked for. The one process started that way starts the others here, by
the environment every launcher uses; accelerate then finds its place in it as usual.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil

RANKS = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Set by every launcher that does start the processes."""


def processes_missing() -> int:
    """How many processes were asked for, if this is the only one started of several; else 0."""
    alone = not any(name in os.environ for name in RANKS)
    cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    if not (alone and cpu and os.environ.get("MASTER_ADDR") == "127.0.0.1"):   # what that launcher sets for several
        return 0
    try:
        launcher = " ".join(psutil.Process().parent().cmdline())
    except (psutil.Error, AttributeError):
        return 0
    asked = re.search(r"\blaunch\b.*--num[_-]processes[= ](\d+)", launcher.split("train_heads.py")[0])
    return int(asked[1]) if asked and int(asked[1]) > 1 else 0


def start_processes(count: int, arguments: list[str]) -> int:
    """Run this command in ``count`` processes that know of each other; the first exit status that is not 0 ends them all."""
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    command = [sys.executable, sys.argv[0], *arguments]
    started = [subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(count)]

    def pass_on(number: int, frame: object) -> None:
        for process in started:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)   # a terminal's interrupt reaches the others by itself
    try:
        while any(process.poll() is None for process in started) and not any(process.poll() for process in started):
            time.sleep(0.05)
        _let_end(started)
    finally:
        for process in started:
            process.kill()
    return next((code if code > 0 else 128 - code for process in started if (code := process.wait())), 0)


def _let_end(started: list[subprocess.Popen[bytes]], seconds: float = 10.0) -> None:
    """When one has ended badly the others wait for it in vain: they get a little time to notice."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(process.poll() is None for process in started):
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
