"""Run a command as a user types it, in a process and a folder of its own, on what the machine has."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
ON_A_GPU = torch.accelerator.is_available()
LIMIT = 1800
"""Seconds of a command, on a busy machine too."""


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, *words: str | Path, status: int = 0, typed: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``headstart`` and require the exit status; what it prints, without progress bars, is in the error otherwise."""
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # the tests' own is one thread
        environment |= {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "false" if ON_A_GPU else "true"}
        command = [sys.executable, "-m", "headstart.cli", *map(str, words)]
        done = subprocess.run(command, cwd=self.path, env=environment, input=typed or "", capture_output=True, text=True, timeout=LIMIT)
        said = re.sub(r"[^\n]*\r", "", done.stderr)
        assert done.returncode == status, f"status {done.returncode}: {done.stdout[-3000:]}\n{said[-3000:]}"
        assert "Traceback" not in said
        return done

    def python(self, code: str) -> dict[str, Any]:
        """Run Python that prints JSON last."""
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], cwd=self.path, env=environment, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text())
