"""Other engines as systems of a benchmark (benchmarks/peers.py), each in a process of its own that answers lines of JSON.

The driver is called as COMMAND FD: it reads a line on the standard input, the job, and writes to the file descriptor FD. Once the model is
loaded it writes ``version`` and ``threads``. Then for each line with ``prompts`` (lists of tokens), ``new_tokens``, ``temperature`` and
``seeds`` it writes ``texts`` (the tokens written after each prompt, a token that ends a text included), ``decoding`` (seconds after the
last of the rows has its first token; null: not known) and ``accepted`` (how many drafts were kept at each depth); or ``error``.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import end_tokens
from headstart.inference.bench.systems import Continuations, System
from headstart.inference.measure import Settings
from headstart.inference.steps import PARTS, Tally
from headstart.support.errors import UserError, cause

VLLM, LLAMA, OPENVINO, ECONOMIZE = "vllm", "llama.cpp", "openvino", "economize"
HERE = Path(__file__).parent
DRIVERS = {
    VLLM: HERE / "peers_vllm.py", LLAMA: HERE / "peers_llama.mjs", OPENVINO: HERE / "peers_openvino.py",
    ECONOMIZE: HERE / "peers_economize.py",
}  # fmt: skip


class Engine(System):
    """A model in another engine. It is loaded when it first writes, so within the warm-up."""

    def __init__(self, name: str, backbone: Backbone, command: Sequence[str], job: dict[str, Any], plain: Engine | None = None) -> None:
        super().__init__(name, backbone)
        self.command, self.job, self.plain, self.drafts = command, job, plain, plain is not None
        self.one_by_one = job["engine"] == OPENVINO
        self.version: str | None = None
        self._process: subprocess.Popen[str] | None = None
        self._said = tempfile.TemporaryFile("w+", errors="replace")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._said.close()
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._answers.close()

    def write(self, prompts: Sequence[Tensor], settings: Settings, seeds: Sequence[int]) -> Continuations:
        if self._process is None:
            self._start()
        asked = {"prompts": [prompt_T.tolist() for prompt_T in prompts], "new_tokens": settings.max_new_tokens}
        found = self._ask(asked | {"temperature": settings.temperature, "seeds": list(seeds)})
        return Continuations([torch.tensor(text, dtype=torch.int64) for text in found["texts"]], counts(found))

    def _start(self) -> None:
        read, write = os.pipe()
        environment = os.environ | {"OMP_NUM_THREADS": str(self.job["threads"]), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": self._said, "stderr": self._said, "pass_fds": (write,), "text": True}
        try:
            self._process = subprocess.Popen([*self.command, str(write)], env=environment, cwd=tempfile.gettempdir(), **pipes)
        except OSError as error:
            raise UserError(f"{self.command[0]} cannot be run ({cause(error)})") from None
        finally:
            os.close(write)
        self._answers = os.fdopen(read, "r")
        loaded = self._ask(self.job)
        self.version = loaded["version"]
        if loaded["threads"] != self.job["threads"]:
            rule = f"not on {self.job['threads']}; unset what sets them in the environment"
            raise UserError(f"{self.name} ran on {loaded['threads']} threads, {rule}")

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        found: dict[str, Any] = json.loads(line) if line.endswith("\n") else {"error": self._last_words()}
        if "error" in found:
            raise UserError(f"{self.name} cannot serve this: {' '.join(found['error'].split())[:400]}")
        return found

    def _last_words(self) -> str:
        assert self._process is not None
        status = self._process.wait()
        self._said.seek(0)
        return f"it ended with status {status}: {' '.join(self._said.read().splitlines()[-6:])}"


def counts(found: dict[str, Any]) -> Tally:
    """The counts of a driver's answer. A pass writes each row's own token and the drafts that were kept."""
    tokens, accepted = sum(map(len, found["texts"])), sum(found["accepted"])
    emitted = tokens - len(found["texts"])
    row_passes = max(emitted - accepted, 1 if emitted else 0)
    passes = -(-row_passes // len(found["texts"]))
    seconds = dict.fromkeys(PARTS, 0.0) | {"verify": found["decoding"] or 0.0}
    return Tally(
        texts=len(found["texts"]), prefills=1, passes=passes, row_passes=row_passes, emitted=emitted, kept=found["accepted"],
        drafts=row_passes if found["accepted"] else 0, accepted=found["accepted"],
        decoded=0 if found["decoding"] is None else emitted, seconds=seconds,
    )  # fmt: skip


def job(model: Path, backbone: Backbone, threads: int, **more: Any) -> dict[str, Any]:
    """What all drivers are told."""
    return {"model": str(model), "stop": sorted(end_tokens(backbone.model.generation_config)), "threads": threads, **more}
