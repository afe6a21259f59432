"""The comparison of engines (benchmarks/peers.py), in miniature: without vLLM, and with a package `vllm` that answers from a file."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small_run import ROOT, make_backbone, rows_of_text

from headstart.cli.failures import guarded
from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.methods import build_drafter
from headstart.inference.measure import Settings, continue_by_transformers

VLLM = '''
import json
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.32.0"
HERE = Path(__file__).parent


def SamplingParams(**given):
    return given


class LLM:
    def __init__(self, **given):
        self.drafts, heads = 0, given["speculative_config"]
        self.answers = json.loads((HERE / "answers.json").read_text())
        (HERE / ("engine-" + (heads["method"] if heads else "plain") + ".json")).write_text(json.dumps(given))
        self.heads, self.largest, self.sizes = heads, given["max_num_seqs"], []

    def generate(self, asked, params, use_tqdm):
        assert not use_tqdm and len(asked) <= self.largest and params["temperature"] == 0
        self.drafts += 3 * len(asked)
        texts = [list(self.answers[str(one["prompt_token_ids"])][: params["max_tokens"]]) for one in asked]
        if self.heads and len(asked) == 2:
            texts[1][-1] += 1
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=text)]) for text in texts]

    def get_metrics(self):
        named = {"num_drafts": self.drafts, "num_accepted_tokens": 2 * self.drafts}
        metrics = [SimpleNamespace(name="vllm:spec_decode_" + name, value=value) for name, value in named.items()]
        by_place = SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[self.drafts, self.drafts])
        return [*metrics, by_place, SimpleNamespace(name="vllm:other", value=1)] if self.heads else []
'''
TORCH = "import os\n\n\ndef get_num_threads():\n    return int(os.environ['OMP_NUM_THREADS'])\n"


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_peers", ROOT / "benchmarks" / "peers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone, heads and prompts, and ``python``, which has the package `vllm` above."""
    folder = tmp_path_factory.mktemp("peers")
    make_backbone(folder / "backbone")
    rows_of_text(folder)
    backbone, tokenizer = load_backbone(str(folder / "backbone"), dtype="fp32"), load_tokenizer(str(folder / "backbone"))
    torch.manual_seed(0)
    build_drafter("eagle3", backbone, {"depth": 2}).save_pretrained(folder / "heads")
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
    answers = {}
    for text in texts[:3]:
        prompt_T = torch.tensor(tokenizer(text)["input_ids"][:8])
        written = continue_by_transformers(backbone.model, [prompt_T], Settings(10), 0)
        answers[str(prompt_T.tolist())] = written.sequences[0, 8:].tolist()
    (folder / "site" / "vllm").mkdir(parents=True)
    (folder / "site" / "vllm" / "__init__.py").write_text(VLLM)
    (folder / "site" / "torch.py").write_text(TORCH)
    (folder / "site" / "vllm" / "answers.json").write_text(json.dumps(answers))
    script(folder / "python", f'shift; PYTHONPATH={folder / "site"} exec {sys.executable} "$@"')
    return folder


def script(file: Path, lines: str) -> Path:
    """A Python with vLLM: called as PYTHON -I, then -c COMMAND or DRIVER JOB RESULT."""
    file.write_text(f"#!/bin/sh\n{lines}\n")
    file.chmod(0o755)
    return file


def words(home: Path, *more: str) -> list[str]:
    given = ["--heads", str(home / "heads"), "--prompts", str(home / "text.jsonl"), "--limit", "3", "--prompt-tokens", "8"]
    return [*given, "--max-new-tokens", "10", "--capture", "off", "--nodes", "4", "--width", "2", *more]


def by_system(report: dict[str, Any]) -> dict[tuple[str, str, int], dict[str, Any]]:
    return {(row["engine"], row["system"].rpartition("/")[2], row["batch"]): row for row in report["peers"]}


def test_without_vllm_the_rest_runs_and_the_report_says_so(peers: ModuleType, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = peers.parsed(words(home, "--batch-size", "1", "--temperature", "0", "1", "--json", str(home / "report.json")))
    assert peers.main(args) == 0
    printed, said = capsys.readouterr()
    report = json.loads((home / "report.json").read_text())
    assert json.loads(printed) == report and "vLLM was not measured: give --vllm PYTHON" in said
    assert report["versions"]["vllm"] is None and report["threads"] == 1 and report["dtype"] == "fp32"
    plain = [("transformers", "without drafts"), ("headstart", "without drafts"), ("transformers", "prompt lookup")]
    heads = [("headstart", "heads, adaptive trees, eagle3 + suffix + recycling"), ("headstart", "heads, fixed trees of 4")]
    assert [(row["engine"], row["system"].rpartition("/")[2]) for row in report["peers"]] == 2 * [*plain, *heads]
    assert [row["prompts_differing_from_headstart"] for row in report["peers"]] == [0, None, 0, 0, 0, None, None, None, 0, 0]
    table = peers.table(report)
    assert "vLLM was not measured" in table and table.count("| 1 | 1 | headstart |") == 3 and "vllm |" not in table
    assert "| 0 | 1 | headstart | without drafts |" in table and "| 3 of 3 | 3 of 3 |" in table


def test_beside_vllm(peers: ModuleType, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = words(home, "--batch-size", "1", "2", "--vllm", str(home / "python"), "--json", str(home / "beside.json"), "--table")
    assert peers.main(peers.parsed(asked)) == 0
    report = json.loads((home / "beside.json").read_text())
    rows = by_system(report)
    chain = "heads, eagle3, chain of 2"
    assert [system for engine, system, _ in rows if engine == "vllm"] == 2 * ["without drafts", chain]
    for batch in (1, 2):
        plain, drafted = rows["vllm", "without drafts", batch], rows["vllm", chain, batch]
        assert plain["tokens"] == drafted["tokens"] == 30 and plain["tokens_per_second"] > 0
        assert plain["tau"] == 1 and plain["mean_acceptance_length"] is None and drafted["mean_acceptance_length"] == 3
        assert plain["prompts_differing_from_headstart"] == 0 and plain["prompts_differing"] == (None if batch == 1 else 0)
        wrong = batch - 1   # a prompt of the one batch of two
        assert drafted["prompts_differing_from_headstart"] == drafted["prompts_differing"] == wrong
    table, said = capsys.readouterr()
    assert table == peers.table(report) + "\n" and "vllm 0.32.0\n" in table and "not measured" not in table + said
    assert "| 0 | 2 | vllm | without drafts |" in table and "| 2 of 3 | 2 of 3 |" in table
    engine = json.loads((home / "site" / "vllm" / "engine-eagle3.json").read_text())
    assert engine["dtype"] == "float32" and engine["max_num_seqs"] == 2 and not engine["enforce_eager"]
    assert engine["max_model_len"] == 8 + 10 + 2 + 1 and engine["speculative_config"]["num_speculative_tokens"] == 2
    assert not engine["enable_prefix_caching"]   # a warmed-up prompt would not be read again


@pytest.mark.parametrize(
    ("python", "more", "words_of_error"),
    [
        (None, (), r"python-0: there is no such file; give the Python of an environment with vLLM 0\.32 \(`make engines`"),
        ("exit 0", ("--dtype", "int8"), "has vLLM none, and this compares with 0.32"),
        ("echo WARNING: x; echo 0.31.2", (), "has vLLM 0.31.2, and this compares with 0.32; `make engines` makes one"),
        ("echo \"ModuleNotFoundError: No module 'vllm'\" >&2; exit 1", (), r"has no vLLM \(ModuleNotFoundError: No module 'vllm'\); give"),
        ("echo 0.32.0", ("--dtype", "int8"), "vLLM is measured in fp32, bf16, fp16, not in int8"),
        ("echo 0.32.0", ("--temperature", "1"), "add 0 to --temperature"),
        ("echo 0.32.0", ("--adapter", "somewhere"), "measured without an adapter"),
    ],
)
def test_bad_input(
    peers: ModuleType, tmp_path: Path, python: str | None, more: tuple[str, ...], words_of_error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "python-0" if python is None else script(tmp_path / "python", python)
    asked = ["--heads", "embedded", "--prompts", "none.jsonl", "--vllm", str(file), *more]
    assert guarded(lambda: peers.main(peers.parsed(asked))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search(words_of_error, line), line


def test_what_stops_vllm_is_one_line(peers: ModuleType, home: Path, tmp_path: Path) -> None:
    job = {"model": "m", "heads": None, "prompts": [[1]], "new_tokens": 2, "stop": [], "dtype": "float32", "batches": [1],
           "max_model_len": 4, "eager": True}  # fmt: skip
    args = peers.parsed(words(home, "--vllm", str(home / "python")))
    with pytest.raises(ValueError, match=r"vLLM cannot serve this: KeyError: '\[1\]'"):
        peers.run(args, "x", job)
    args.vllm = script(tmp_path / "python", f"OMP_NUM_THREADS=3 exec {home / 'python'} \"$@\"")
    prompt = next(iter(json.loads((home / "site" / "vllm" / "answers.json").read_text())))
    with pytest.raises(ValueError, match="vLLM ran on 3 threads, not on 1"):
        peers.run(args, "x", job | {"prompts": [json.loads(prompt)]})
