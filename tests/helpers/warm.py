"""Run a shell script whose Python commands run in this process, where torch and transformers are already imported, to save time."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from unittest import mock

STUB = """#!{python} -IS
import sys
from multiprocessing.connection import Client
with Client({address!r}) as server:
    server.send(sys.argv[1:])
    out, err, status = server.recv()
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(status)
"""


def run_warm(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command; PYTHON is a stub that forwards its arguments here. They run in the main thread, which signals require."""
    with tempfile.TemporaryDirectory() as folder:
        address, python = f"{folder}/socket", Path(folder) / "python"
        python.write_text(STUB.format(python=sys.executable, address=address))
        python.chmod(0o755)
        with Listener(address, "AF_UNIX") as listener:
            environment = {**os.environ, "PYTHON": str(python), **environment}
            process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/")
            output: list[str] = []
            threading.Thread(target=_wait, args=(process, output, address), daemon=True).start()
            while (request := _take(listener)) is not None:
                connection, arguments = request
                with connection:
                    connection.send(_serve(arguments))
        return subprocess.CompletedProcess(command, process.returncode, *output)


def _wait(process: subprocess.Popen[str], output: list[str], address: str) -> None:
    """Wait for the process to end, then tell the listener by an empty request."""
    try:
        output += process.communicate(timeout=240)
    finally:
        process.kill()
        with Client(address) as server:
            server.send(None)


def _take(listener: Listener) -> tuple[Connection, list[str]] | None:
    connection = listener.accept()
    arguments = connection.recv()
    return None if arguments is None else (connection, arguments)


def _serve(arguments: list[str]) -> tuple[str, str, int]:
    """Behave as an interpreter: ``-c CODE``, ``-m MODULE ...`` or ``FILE ...``; returns stdout, stderr and the exit status."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    kind, *rest = arguments
    argv = mock.patch.object(sys, "argv", rest if kind == "-m" else arguments)
    with redirect_stdout(out), redirect_stderr(err), argv, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'headstart.cli.main' found in sys.modules")
        try:
            if kind == "-c":
                exec(rest[0], {})
            elif kind == "-m":
                runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(kind, run_name="__main__")
        except SystemExit as exit:
            status = exit.code if isinstance(exit.code, int) else 0
    return out.getvalue(), err.getvalue(), status
