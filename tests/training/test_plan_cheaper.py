"""What `headstart plan` says of the readouts, and of a smaller draft vocabulary and depth."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import ROOT, make_recipe
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.cli.main import main
from headstart.training.plan import cheaper as settings
from headstart.training.plan.cheaper import cheaper
from headstart.training.plan.compute import step_operations
from headstart.training.plan.fake_model import make_fake_models
from headstart.training.plan.memory import MemoryPlan, MicroBatch
from headstart.training.plan.plan import read_data
from headstart.training.plan.table import cheaper_lines
from headstart.training.recipe.recipe import load_recipe


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe on a backbone of more tokens than its tokenizer has."""
    folder = tmp_path_factory.mktemp("small")
    path = make_recipe(folder, drafter={"kind": "eagle3", "depth": 6})
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=1024, hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(folder / "backbone")
    return path


@pytest.mark.parametrize("weights", ["expected", pytest.param("geometric", marks=pytest.mark.slow)])
def test_readouts_take_what_they_take_in_a_step(small: Path, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a count of every product of the real step on fake tensors."""
    monkeypatch.setattr(settings, "VOCABULARY", 128)
    counts, found = [], []
    for change in ([], ["drafter.draft_vocab_size=128"]):
        recipe = load_recipe(small, [f"objective.depth_weights={weights}", *change])
        models = make_fake_models(recipe, False)
        counts.append(sum(step_operations(MemoryPlan(recipe, models, False, False), MicroBatch(1, 128)).values()) / 128)
        found.append(cheaper(recipe, models, None))
    now = found[0]
    assert now is not None and found[1] is None
    saved = now["operations_per_token"] * (1 - now["settings"][0]["arithmetic"])
    assert saved == pytest.approx(counts[0] - counts[1], rel=0.03)


def test_less_is_proposed(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "VOCABULARY", 64)
    recipe = load_recipe(small)
    models = make_fake_models(recipe, False)
    found = cheaper(recipe, models, read_data(recipe, models))
    assert found is not None
    assert (found["depth"], found["vocab_size"]) == (6, 1024) and 0.5 < found["readouts"] < 1 and 0.5 < found["coverage"] <= 1
    values = [one["values"] for one in found["settings"]]
    assert values == [{"draft_vocab_size": 64}, {"depth": 4}, {"draft_vocab_size": 64, "depth": 4}]
    shares = [one["arithmetic"] for one in found["settings"]]
    assert shares[2] < shares[0] < shares[1] < 1
    first, *_, last = cheaper_lines(found)
    assert re.search(r"^readouts  \d\d% of [\d.]+ GFLOP a token: label tokens are read out at 6 depths over 1,024 tokens$", first)
    both = f"          drafter.draft_vocab_size=64 drafter.depth=4: {shares[2]:.2f} of the arithmetic; drafts are accepted in at most"
    assert last.startswith(both) and f"{found['coverage']:.1%}, its tokens' share of the answers" in last


@pytest.mark.slow
def test_the_plan_says_so(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(settings, "VOCABULARY", 64)
    assert main(["plan", str(small), "--no-calibration", "--json", str(tmp_path / "plan.json")]) == 0
    report = json.loads((tmp_path / "plan.json").read_text())
    assert "\n".join(cheaper_lines(report["cheaper"])) in capsys.readouterr().out


def test_nothing_is_proposed_where_little_would_be_saved(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, medusa = load_recipe(small), load_recipe(small, ["drafter={kind: medusa}"])
    models = make_fake_models(recipe, False)
    assert cheaper(recipe, models, None) is None, "a small vocabulary"
    monkeypatch.setattr(settings, "VOCABULARY", 64)
    found = cheaper(recipe, models, None)
    assert found is not None and found["coverage"] is None
    assert cheaper(medusa, models, None) is None
    monkeypatch.setattr(settings, "LEAST", 0.99)
    assert cheaper(recipe, models, None) is None, "readouts are a small part"


def test_the_demos_recipe_has_what_is_proposed() -> None:
    recipe = load_recipe(ROOT / "recipes" / "smollm2" / "eagle3.yaml")
    assert (recipe.drafter["depth"], recipe.drafter["draft_vocab_size"]) == (settings.DEPTH, settings.VOCABULARY)
