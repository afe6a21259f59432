"""benchmarks/peers.py with vLLM: in fp32 it writes Headstart's text, with and without heads, and counts acceptance as Headstart does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from trained import ROOT

from headstart.inference.serving.verification import vllm

PROMPTS = 3


def test_vllm_beside_headstart(tmp_path: Path) -> None:
    given = ["--heads", "embedded", "--prompts", "recipes/quickstart/prompts.jsonl", "--limit", str(PROMPTS), "--max-new-tokens", "24"]
    chain = ["--nodes", "5", "--width", "1", "--batch-size", "1", "2", "--vllm-eager", "--vllm", str(vllm.find_python())]
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), *given, *chain, "--json", str(tmp_path / "peers.json")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "peers.json").read_text())
    assert report["versions"]["vllm"].startswith("0.32.0")
    rows = [row for row in report["peers"] if row["engine"] == "vllm"]
    assert [(row["batch"], row["system"]) for row in rows] == [
        (batch, system) for batch in (1, 2) for system in ("without drafts", "embedded, eagle3, chain of 4")
    ]
    assert {row["prompts_differing_from_headstart"] for row in rows} == {0}
    ours = next(row for row in report["peers"] if row["batch"] == 1 and row["system"] == "embedded, fixed trees of 5")
    assert abs(rows[1]["mean_acceptance_length"] - ours["mean_acceptance_length"]) < 1e-9
