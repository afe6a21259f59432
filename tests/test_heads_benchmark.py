"""The comparison of heads (benchmarks/heads.py): runs in miniature, skips what is done, and has an entry for every kind."""

from __future__ import annotations

import importlib.util
import json
import sys
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


def test_a_comparison_in_miniature(comparison: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_recipe(tmp_path)
    monkeypatch.setattr(comparison, "TRIAL_STEPS", 3)
    monkeypatch.setattr(comparison, "WARM_UP", 1)
    monkeypatch.setitem(comparison.ENTRIES, "other", comparison.Entry("medusa", ("drafter.no_such_key=3",)))

    def report(*more: str) -> Any:
        return comparison.main(comparison.parser().parse_args([*more, *options(tmp_path)]))

    asked = ["--only", "medusa", "mtp", "other", "--seeds", "0", "1", "--tokens", "400"]
    found = report(*asked)
    assert [*found["failed"]] == ["other"] and "drafter.no_such_key" in found["failed"]["other"]
    assert [entry["entry"] for entry in found["entries"]] == ["medusa", "mtp"]
    for entry in found["entries"]:
        assert entry["seeds"] == [0, 1] and entry["chain"] == [5, 0]
        assert 300 < entry["tokens"][0] < 500 and entry["parameters"][1] == 0 and entry["ar_tokens_per_second_1"][0] > 0
        for name in ("chain_0", "chain_1", "tree_0", "tree_1"):
            assert 1 <= entry[f"tau_{name}"][0] <= 6 and entry[f"prompts_differing_{name}"] == [0, 0]
        for name in ("chain_0", "chain_1", "adaptive_0", "adaptive_1"):
            assert entry[f"speedup_{name}"][0] > 0
    lines = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 4 and json.loads(lines[0])["seed"] == 0
    again = report(*asked)   # nothing is done twice
    assert again["entries"] == found["entries"] and len((tmp_path / "out" / "runs.jsonl").read_text().splitlines()) == 4
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "training_speeds", lambda folder: [(100, 1000.0)] * 3)
        timed = report("--only", "medusa", "--seeds", "0", "--seconds", "0.3")["entries"][-1]
    step_tokens = comparison.tokens_per_step(comparison.parser().parse_args(options(tmp_path)))
    assert timed["budget"] == "seconds" and timed["steps"] == [round(300 / step_tokens), None] and timed["tau_chain_0"][1] is None
    table = report("--table", "--plot", str(tmp_path / "heads.svg"))
    assert table.count("| mtp |") == 1 and table.count("| medusa |") == 2 and "**backbone, 400 training tokens**" in table
    assert "Means and standard errors over 2 seeds." in table and " ± " in table
    texts = [text.text for text in ElementTree.fromstring((tmp_path / "heads.svg").read_text()).iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("medusa") == 2 and any("400 training tokens" in str(text) for text in texts)


def test_every_kind_has_an_entry(comparison: ModuleType, tmp_path: Path) -> None:
    args = comparison.parser().parse_args(["--out", str(tmp_path), "--tokens", "1000"])
    assert set(methods()) == {entry.kind for entry in comparison.ENTRIES.values()}
    for entry in comparison.ENTRIES.values():
        assert comparison.recipe_of(entry, args).drafter["kind"] == entry.kind
