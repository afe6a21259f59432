"""benchmarks/peers.py with vLLM: in fp32 it writes Headstart's text, with and without heads, and counts acceptance as Headstart does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from trained import ROOT

from headstart.serving.verify.vllm import VLLM

PROMPTS = 3


def test_vllm_beside_headstart(tmp_path: Path) -> None:
    given = ["--heads", "embedded", "--prompts", "recipes/quickstart/prompts.jsonl", "--limit", str(PROMPTS), "--max-new-tokens", "24"]
    chain = ["--nodes", "5", "--width", "1", "--temperature", "0", "--batch-size", "1", "2", "--vllm-eager", "--dtype", "fp32"]
    command = [sys.executable, str(ROOT / "benchmarks" / "peers.py"), *given, *chain, "--threads", "1", "--vllm", str(VLLM.find_python())]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--json", str(tmp_path / "peers.json")], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((tmp_path / "peers.json").read_text())
    assert report["versions"]["vllm"].startswith("0.32.0")
    rows = [row for row in report["baselines"] if row["name"].startswith("vLLM")]
    assert [(row["batch"], row["name"]) for row in rows] == [
        (batch, system) for batch in (1, 2) for system in ("vLLM", "vLLM with embedded, chain of 4")
    ]
    assert {row["prompts_differing_from_headstart"] for row in rows} == {0} and all(row["decode_tokens_per_second"] for row in rows)
    ours = next(row for row in report["results"] if row["batch"] == 1 and row["head"] == "embedded, alone")
    assert abs(rows[1]["tau"] - ours["tau"]) < 0.05 * ours["tau"]  # vLLM counts drafts past the end of a text too
