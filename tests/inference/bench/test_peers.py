"""The comparison of engines (benchmarks/peers.py), in miniature: alone, and beside engines that answer from a file."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from gguf_models import chat_model, write_gguf
from small_run import ROOT

from headstart.chat.prompts import Prompter, read_prompts
from headstart.cli.failures import Guard
from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.methods import build_drafter
from headstart.inference.measure import Settings, continue_by_transformers

TOKENS = 10
VLLM = """
import json
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.32.0"
HERE = Path(__file__).parent
SamplingParams = SimpleNamespace


class LLM:
    def __init__(self, **given):
        self.kept, heads = 0, given["speculative_config"]
        self.answers = json.loads((HERE / "answers.json").read_text())
        given["files"] = sorted(path.name for path in Path(given["model"]).iterdir())
        (HERE / ("engine-" + (heads["method"] if heads else "plain") + ".json")).write_text(json.dumps(given))
        self.heads, self.largest = heads, given["max_num_seqs"]

    def generate(self, asked, params, use_tqdm):
        assert not use_tqdm and len(asked) == len(params) <= self.largest
        print("vLLM prints much")
        texts = [list(self.answers[str(one["prompt_token_ids"])][: how.max_tokens]) for one, how in zip(asked, params)]
        if self.heads:
            self.kept += sum(map(len, texts)) // 2
        if self.heads and len(asked) == 2:
            texts[1][-1] += 1
        times = SimpleNamespace(first_token_ts=100.0, last_token_ts=102.0)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=text)], metrics=times) for text in texts]

    def get_metrics(self):
        by_depth = SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[self.kept, 0])
        return [by_depth, SimpleNamespace(name="vllm:other", value=1)] if self.heads else []
"""
TORCH = "import os\n\n\ndef get_num_threads():\n    return int(os.environ['OMP_NUM_THREADS'])\n"
NODE = """
import json, os, sys
answers = json.load(open(sys.argv[0] + ".answers"))
driver, folder, descriptor = sys.argv[1:]
assert driver.endswith("peers_llama.mjs") and os.path.isdir(folder)
with os.fdopen(int(descriptor), "w") as out:
    job = json.loads(sys.stdin.readline())
    assert job["model"].endswith("tiny.gguf") and job["rows"] == 2 and job["max_model_len"] > 10
    print(json.dumps({"version": "b1", "threads": job["threads"]}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        texts = [answers[str(prompt)] for prompt in asked["prompts"]]
        print(json.dumps({"texts": texts, "decoding": 0.5, "accepted": []}), file=out, flush=True)
"""


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import peers
    finally:
        sys.path.pop(0)
    return peers


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file, heads and prompts of two tasks; ``python``, which has the package `vllm` above, and ``node``, which is none."""
    folder = tmp_path_factory.mktemp("peers")
    gguf = write_gguf(folder / "tiny.gguf", *chat_model())
    backbone, tokenizer = load_backbone(str(gguf), dtype="fp32"), load_tokenizer(str(gguf))
    torch.manual_seed(0)
    build_drafter("eagle3", backbone, {"depth": 2}).save_pretrained(folder / "heads")
    rows = [{"task": task, "messages": [{"role": "user", "content": text}]} for task, text in (("a", "one"), ("b", "two"), ("b", "six"))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = {}
    for prompt in read_prompts(folder / "rows.jsonl", Prompter(tokenizer)):
        written = continue_by_transformers(backbone.model, [prompt.ids_T], Settings(TOKENS), 0)
        answers[str(prompt.ids_T.tolist())] = written.sequences[0, len(prompt.ids_T) :].tolist()
    (folder / "site" / "vllm").mkdir(parents=True)
    (folder / "site" / "vllm" / "__init__.py").write_text(VLLM)
    (folder / "site" / "torch.py").write_text(TORCH)
    for file in (folder / "site" / "vllm" / "answers.json", folder / "node.py.answers"):
        file.write_text(json.dumps(answers))
    (folder / "llama" / "node_modules" / "node-llama-cpp").mkdir(parents=True)
    (folder / "llama" / "node_modules" / "node-llama-cpp" / "package.json").touch()
    (folder / "node.py").write_text(NODE)
    script(folder / "node", f'exec {sys.executable} {folder / "node.py"} "$@"')
    script(folder / "python", f'shift; PYTHONPATH={folder / "site"} exec {sys.executable} "$@"')
    return folder


def script(file: Path, lines: str) -> Path:
    """A program; as a Python with vLLM it is called as PYTHON -I, then -c COMMAND or DRIVER FD."""
    file.write_text(f"#!/bin/sh\n{lines}\n")
    file.chmod(0o755)
    return file


def words(home: Path, *more: str) -> list[str]:
    given = ["--heads", str(home / "heads"), "--prompts", str(home / "rows.jsonl"), "--max-new-tokens", str(TOKENS), "--threads", "1"]
    return [*given, "--capture", "off", "--nodes", "4", "--width", "2", "--dtype", "fp32", *more]


def test_it_stands_alone(peers: ModuleType, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = peers.parsed(words(home, "--batch-size", "1", "--json", str(home / "report.json"), "--html", str(home / "page.html")))
    assert peers.main(args) == 0
    table, report = capsys.readouterr().out, json.loads((home / "report.json").read_text())
    assert table == peers.markdown(report) + "\n" and "Not measured: vllm, llama.cpp" in table
    heads = str(home / "heads")
    systems = ["AR (transformers)", "AR (headstart)", "prompt lookup", heads, f"{heads}, alone"]
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith(("| 0 |", "| 1 |"))]
    assert [line[2] for line in lines] == 4 * systems, "at temperatures 0 and 1, all prompts and then by task"
    assert [line[3:] and line[-2] for line in lines[:2]] == ["", ""] and [line[-1] for line in lines[3:5]] == 2 * ["3 of 3 |"]
    assert "| 0 | 1 | AR (transformers) | 1.00 |" in table and "system, tokens/s | a | b |" in table
    html = (home / "page.html").read_text()
    assert "<h2>Tasks</h2>" in html and "<h2>Speed</h2>" in html


def test_beside_the_others(peers: ModuleType, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = ["--vllm", str(home / "python"), "--llama", str(home / "llama"), "--node", str(home / "node")]
    asked = words(home, "--batch-size", "1", "2", "--temperature", "0", "--json", str(home / "beside.json"), *others)
    assert peers.main(peers.parsed(asked)) == 0
    report, table = json.loads((home / "beside.json").read_text()), capsys.readouterr().out
    rows = {(row["name"], row["batch"]): row for row in report["baselines"]}
    chain = f"vLLM with {home / 'heads'}, chain of 2"
    assert {name for name, _ in rows} == {"AR (transformers)", "AR (headstart)", "prompt lookup", "vLLM", chain, "llama.cpp"}
    for batch in (1, 2):
        for name in ("vLLM", "llama.cpp"):
            assert rows[name, batch]["prompts_differing_from_headstart"] == 0 and rows[name, batch]["prompts_differing"] is None
            assert rows[name, batch]["tau"] == 1 and rows[name, batch]["kind"] == "ar"
        drafted, wrong = rows[chain, batch], batch - 1  # a prompt of the one batch of two
        assert drafted["prompts_differing"] == drafted["prompts_differing_from_headstart"] == wrong
        assert drafted["tau"] > 1.5 and drafted["kind"] == "assisted"
    after_the_first = rows["vLLM", 1]["tokens"] - 3 * 3
    assert rows["vLLM", 1]["decode_tokens_per_second"] == pytest.approx(after_the_first / 18.0), (
        "three texts of two seconds in three rounds"
    )
    task = rows["llama.cpp", 2]["tasks"]["b"]
    assert task["decode_tokens_per_second"] == pytest.approx((task["tokens"] - 2 * 3) / 1.5), "two texts in one batch, in three rounds"
    assert report["versions"]["vllm"] == "0.32.0" and "llama.cpp b1" in table and "Not measured" not in table
    engine = json.loads((home / "site" / "vllm" / "engine-eagle3.json").read_text())
    assert engine["dtype"] == "float32" and engine["max_num_seqs"] == 2 and not engine["enforce_eager"]
    assert engine["speculative_config"]["num_speculative_tokens"] == 2 and not engine["enable_prefix_caching"]
    assert "model.safetensors" in engine["files"], "the weights of the GGUF file"


def test_the_driver_of_llama_cpp_is_sound() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    done = subprocess.run([node, "--check", str(ROOT / "benchmarks" / "peers_llama.mjs")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("program", "more", "words_of_error"),
    [
        (None, (), r"python-0: there is no such file; give the Python of an environment with vLLM 0\.32 \(`make engines`"),
        ("exit 0", ("--dtype", "int8"), "has vLLM none, and this compares with 0.32"),
        ("echo WARNING: x; echo 0.31.2", (), "has vLLM 0.31.2, and this compares with 0.32; `make engines` makes one"),
        ("echo \"ModuleNotFoundError: No module 'vllm'\" >&2; exit 1", (), r"has no vLLM \(ModuleNotFoundError: No module 'vllm'\); give"),
        ("echo 0.32.0", ("--dtype", "int8"), "vLLM is measured in fp32, bf16, fp16, not in int8"),
        ("echo 0.32.0", ("--adapter", "somewhere"), "measured without an adapter; leave --adapter or --vllm out"),
        ("echo 0.32.0", ("--llama", "nowhere"), "--llama nowhere has no node-llama-cpp; `npm install --prefix FOLDER"),
    ],
)
def test_bad_input(
    peers: ModuleType, tmp_path: Path, program: str | None, more: tuple[str, ...], words_of_error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "python-0" if program is None else script(tmp_path / "python", program)
    asked = ["--heads", "embedded", "--prompts", "none.jsonl", "--vllm", str(file), *more]
    with Guard() as guard:
        peers.main(peers.parsed(asked))
    assert guard.status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search(words_of_error, line), line


def test_without_heads_or_a_gguf_file(peers: ModuleType, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = peers.parsed([])
    assert (asked.heads, asked.backbone) == (["smollm2"], None), "the model of the hub"
    peers.GGUF.parent.mkdir(parents=True)
    peers.GGUF.touch()
    assert peers.parsed([]).backbone == str(peers.GGUF) and peers.parsed(["--heads", "other"]).backbone is None
    args = peers.parsed(["--heads", "embedded", "--llama", str(home / "llama")])
    with pytest.raises(ValueError, match="llama.cpp reads GGUF files, and the model is embedded"):
        peers.main(args)


def test_what_stops_an_engine_is_one_line(peers: ModuleType, home: Path, tmp_path: Path) -> None:
    backbone = load_backbone(str(home / "tiny.gguf"), dtype="fp32")
    job = peers.job(tmp_path, backbone, 1, heads=None, dtype="float32", rows=1, max_model_len=4, eager=True)
    command = [str(home / "python"), "-I", str(peers.DRIVERS[peers.VLLM])]
    for more, message in (
        ({}, r"vLLM cannot serve this: KeyError: '\[1\]'"),
        ({"program": script(tmp_path / "three", f'OMP_NUM_THREADS=3 exec {home / "python"} "$@"')}, "vLLM ran on 3 threads, not on 1"),
        ({"program": script(tmp_path / "dies", "echo no memory >&2; exit 7")}, "cannot serve this: it ended with status 7: no memory"),
        ({"program": tmp_path / "none"}, "none cannot be run"),
    ):
        program = str(more.get("program", command[0]))
        with peers.Engine("vLLM", backbone, [program, *command[1:]], job) as engine, pytest.raises(ValueError, match=message):
            engine.write([torch.tensor([1])], Settings(2), [0])
