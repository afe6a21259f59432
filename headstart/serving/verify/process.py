"""An engine in a process of its own: engine and Headstart need other versions of the same libraries, so each has its own environment.

A driver is a script that the engine's Python runs, ``driver JOB.json RESULT.json``, with nothing of Headstart.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.support.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class EngineProcess:
    """How an engine is found and run."""

    engine: str
    package: str
    """What the environment has, with its version."""
    variable: str
    """Environment variable that names the environment's Python."""
    python: Path
    """Where `make engines` puts it in a checkout."""
    driver: Path
    environment: dict[str, str] = field(default_factory=dict)
    quantised: str = ""
    """Why its texts and drafts differ on a quantised backbone, if they do."""

    def find_python(self) -> Path:
        """Return the Python of an environment with the engine. Raises UserError if there is none."""
        named = os.environ.get(self.variable)
        if named is not None and not Path(named).is_file():
            raise UserError(f"{self.variable}={named} is no file; name the Python of an environment with {self.package}")
        python = self.python if named is None else Path(named)
        if not python.is_file():
            where = f"in a checkout, or set {self.variable} to the Python of an environment with {self.package}"
            raise UserError(f"{self.engine} is not installed: run `make engines` {where}")
        return python

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run the driver on one thread and return its result. Raises UserError, with the engine's own words, if it fails."""
        python = self.find_python()
        with tempfile.TemporaryDirectory() as name:
            work = Path(name)
            (work / "job.json").write_text(json.dumps(job))
            files = [str(work / name) for name in ("job.json", "result.json")]
            command = [str(python), "-I", str(self.driver), *files]  # -I: the vllm.py of this folder is not vLLM
            environment = os.environ | {"OMP_NUM_THREADS": "1"} | self.environment
            done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, errors="replace")
            file = work / "result.json"
            if not file.is_file():
                log = work / "stderr"  # where a driver sends the engine's log
                said = done.stdout + done.stderr + (log.read_text(errors="replace") if log.is_file() else "")
                said = _one_line(" ".join(said.split("\n")[-8:]))
                raise UserError(f"{self.engine} ended with status {done.returncode} and without a result: {said}")
            result: dict[str, Any] = json.loads(file.read_text())
        if "error" in result:
            raise UserError(f"{self.engine} cannot serve this: {_one_line(result['error'])}")
        return result


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
