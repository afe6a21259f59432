"""The comparison of heads (benchmarks/heads.py): runs in miniature, skips what is done, and has an entry for every kind."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from accelerate.state import AcceleratorState
from small_run import ROOT, make_recipe

from headstart.heads.methods import methods


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    spec = importlib.util.spec_from_file_location("benchmark_of_heads", ROOT / "benchmarks" / "heads.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def options(folder: Path, *more: str) -> list[str]:
    rows = str(folder / "text.jsonl")
    given = ["--out", str(folder / "out"), "--backbone", str(folder / "backbone"), "--train", rows, "--eval", rows, "--prompts", "1"]
    return [*given, "--capture", "off", "--new-tokens", "12", "data.max_length=48", "eval.prompt_tokens=8", *more]


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
def test_a_comparison_in_miniature(comparison: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_recipe(tmp_path)
    entries = comparison.ENTRIES
    monkeypatch.setitem(entries, "other", replace(entries["medusa"], changes=("drafter.no_such_key=3",)))
    out = tmp_path / "out"

    def report(*more: str) -> Any:
        return comparison.main(comparison.parser().parse_args([*more, *options(tmp_path)]))

    asked = ["--only", "medusa", "medusa-2", "mtp", "other", "--seeds", "0", "1", "--tokens", "400"]
    found = report(*asked)
    assert [*found["failed"]] == ["other"] and "drafter.no_such_key" in found["failed"]["other"]
    assert [entry["entry"] for entry in found["entries"]] == ["medusa", "medusa-2", "mtp"]
    for entry in found["entries"]:
        assert entry["seeds"] == [0, 1] and entry["chain"] == [5, 0] and ("backbone_loss" in entry) == (entry["entry"] == "medusa-2")
        assert 300 < entry["tokens"][0] < 500 and entry["parameters"][1] == 0
        for name in ("chain_0", "chain_1", "tree_0", "tree_1"):
            assert 1 <= entry[f"tau_{name}"][0] <= 6 and entry[f"prompts_differing_{name}"] == [0, 0]
    runs = lines(out / "runs.jsonl")
    assert [run["seed"] for run in runs] == [0] * 3 + [1] * 3 and len([*(out / "heads").iterdir()]) == 3  # those of the first seed
    assert report(*asked)["entries"] == found["entries"] and lines(out / "runs.jsonl") == runs  # nothing is done twice
    assert "drafting ms" not in report(*asked, "--table")

    timed = report("--only", "medusa-2", "--seeds", "0", "1", "--tokens", "400", "--time")["entries"]
    assert lines(out / "runs.jsonl") == runs and len(lines(out / "timings.jsonl")) == 1
    for name in ("chain_0", "chain_1", "adaptive_0", "adaptive_1"):
        assert timed[1][f"speedup_{name}"][0] > 0 and timed[1][f"draft_ms_{name}"][0] > 0
    assert timed[1]["ar_tokens_per_second_1"][0] > 0 and "speedup_chain_0" not in timed[0]
    table = report("--table", "--plot", str(tmp_path / "heads.svg"))
    assert table.count("| mtp |") == table.count("| medusa |") == 1 and "**backbone, 400 training tokens**" in table
    assert "Means and standard errors over 2 seeds." in table and " ± " in table and "drafting ms" in table
    texts = [text.text for text in ElementTree.fromstring((tmp_path / "heads.svg").read_text()).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("medusa") == 1 and any("400 training tokens" in str(text) for text in texts)


def test_seconds_become_steps_by_the_speed_measured_before(comparison: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_recipe(tmp_path)
    monkeypatch.setattr(comparison, "TRIAL_STEPS", 3)
    monkeypatch.setattr(comparison, "WARM_UP", 1)
    monkeypatch.setattr(comparison, "step_speeds", lambda folder: [1.0, 1000.0, 1000.0])
    args = comparison.parser().parse_args(["--only", "medusa", "--seeds", "0", "--seconds", "0.3", *options(tmp_path)])
    (entry,) = comparison.main(args)["entries"]
    assert entry["tokens_per_second"] == [1000, None] and entry["tau_chain_0"][1] is None
    sizes = [len(sample.tokens) for sample in comparison.Comparison(args)._data.train]
    assert entry["steps"] == [round(300 / (4 * sum(sizes) / len(sizes))), None]


def test_every_kind_has_an_entry(comparison: ModuleType, tmp_path: Path) -> None:
    args = comparison.parser().parse_args(["--out", str(tmp_path), "--tokens", "1000"])
    assert set(methods()) == {entry.kind for entry in comparison.ENTRIES.values()}
    for name, entry in comparison.ENTRIES.items():
        assert comparison.recipe_of(name, args).drafter["kind"] == entry.kind
