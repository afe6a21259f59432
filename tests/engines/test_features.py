"""Training on hidden states of two real vLLM servers, one of which is killed: every loss is that of the run in process (fp32)."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_run import read_log
from trained import ROOT

from headstart.serving.verify.vllm import VLLM

STEPS = 200
RECIPE = [
    str(ROOT / "recipes" / "quickstart" / "eagle3.yaml"), "backbone.dtype=fp32", "drafter.depth=3", "data.max_length=128",
    "data.eval_rows=0",
    f"train.steps={STEPS}", "train.batch_size=2", "train.precision=no", "log.every=1",
]  # fmt: skip


def headstart(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "headstart.cli", *arguments]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_log(folder) if "loss" in line] if (folder / "log.jsonl").exists() else []


def require(condition: bool, log: Path) -> None:
    assert condition, log.read_text()[-2000:]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Two servers by their addresses, started by the lines that ``headstart serve-features`` prints."""
    urls = [f"http://localhost:{free_port()}" for _ in range(2)]
    started, options = {}, [f"features.endpoint={json.dumps(urls)}", f"features.folder={tmp_path}/states"]
    try:
        for url in urls:
            ask = headstart("serve-features", "--cpu", "--port", url.split(":")[-1], *RECIPE, *options)
            printed = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout
            line = next(line for line in printed.splitlines() if "vllm.entrypoints" in line)
            line = line.replace(" python -m ", f" {shlex.quote(str(VLLM.find_python()))} -m ")
            with (tmp_path / f"server-{len(started)}.log").open("wb") as log:
                started[url] = subprocess.Popen(line, shell=True, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        for number, (url, server) in enumerate(started.items()):
            wait_for(url, server, tmp_path / f"server-{number}.log")
        yield started
    finally:
        for server in started.values():
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while True:
        require(server.poll() is None and time.monotonic() < deadline, log)
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(1)


def test_of_two_servers_one_is_killed(servers: dict[str, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    options = [f"features.endpoint={json.dumps(list(servers))}", f"features.folder={tmp_path}/states", f"save.dir={tmp_path}/served"]
    log = tmp_path / "served.log"
    with log.open("wb") as written:
        run = subprocess.Popen(headstart("train", *RECIPE, *options), cwd=ROOT, stdout=written, stderr=written)
    while len(losses(tmp_path / "served")) < STEPS // 2:
        require(run.poll() is None, log)
        time.sleep(0.1)
    os.killpg(next(iter(servers.values())).pid, signal.SIGKILL)
    require(run.wait(600) == 0, log)
    assert list((tmp_path / "states").iterdir()) == []

    subprocess.run(headstart("train", *RECIPE, f"save.dir={tmp_path}/live"), cwd=ROOT, capture_output=True, check=True)
    served, live = losses(tmp_path / "served"), losses(tmp_path / "live")
    assert len(live) == STEPS and served == pytest.approx(live, rel=1e-3)
    print(f"largest difference of a loss: {max(abs(one / other - 1) for one, other in zip(served, live, strict=True)):.2g}")
