"""What ``auto`` stands for: chosen by the size of the run, shown by the plan, used and recorded by training, kept when a run goes on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from errors import report_of
from families import backbone
from small_run import make_recipe, memory_plan, prepared, read_log
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headstart import Backbone, load_recipe
from headstart.cli.train import main
from headstart.heads.methods import build_drafter
from headstart.support.devices import bf16_instructions
from headstart.training.plan.memory import MicroBatch
from headstart.training.run.optimizer import MuonAdamW
from headstart.training.run.start import ADAPTED, advice, choose, learning_rate

MUON = ["train.optimizer=muon", "train.lr=1e-3"]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return make_recipe(tmp_path, train={"lr": "auto", "steps": 6}, eval={"prompts": 1, "max_new_tokens": 2}, log={"every": 1})


def test_the_optimizer_follows_the_rate(small: Path) -> None:
    """Published rates are AdamW's."""
    for changes, optimizer in (([], "muon"), (["train.lr=1e-3"], "adamw"), (["train.optimizer=adamw"], "adamw"), (MUON, "muon")):
        assert load_recipe(small, changes).train.chosen_optimizer == optimizer
        run = prepared(small, *changes, "drafter={kind: eagle3, depth: 2}")
        assert isinstance(run.trainers[0].optimizer.optimizer, MuonAdamW) == (optimizer == "muon")


def chosen_by(run: Any) -> float:
    rate: float = run.trainers[0].recipe.train.lr
    return rate


def test_the_rule_is_as_documented() -> None:
    """docs/defaults.md: the square root of the steps up to 1,000, the fourth root beyond."""
    assert [learning_rate("muon", 128, 512, steps) for steps in (10, 75, 300, 1000, 16_000)] == [0.03, 0.02, 0.01, 0.0055, 0.0027]
    assert learning_rate("muon", 384, 1018, 570) == 0.0029 and learning_rate("adamw", 4096, 16_000, 26_000) == 9e-5
    assert learning_rate("muon", 1, 1e9, 1) <= 0.05  # bounded
    assert learning_rate("muon", 256, 1000, 1000, adapted=True) == pytest.approx(ADAPTED * learning_rate("muon", 256, 1000, 1000), rel=0.1)


def test_the_plan_says_what_training_takes_and_records(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = report_of(tmp_path, "plan", small, "--no-calibration")["chosen"][""]
    rate = planned["values"]["train.lr"]
    assert f"chosen    train.optimizer=muon, train.lr={rate} (auto: width 16, 6 steps of about" in capsys.readouterr().out
    assert main([str(small)]) == 0
    assert f"train.lr={rate} (auto: width 16" in capsys.readouterr().err
    log = read_log(tmp_path / "out")
    assert [line["chosen"] for line in log if "chosen" in line] == [planned["values"]]
    assert max(line["lr"] for line in log if "lr" in line) == pytest.approx(rate)
    provenance = json.loads((tmp_path / "out" / "headstart.json").read_text())
    assert f'"lr": {rate}' in json.dumps(provenance)


def test_a_number_is_taken_as_it_is(small: Path) -> None:
    run = prepared(small, "train.lr=0.125")
    assert chosen_by(run) == 0.125 and not run.trainers[0].chosen.values


@pytest.mark.parametrize(("drafter", "changes", "ratio"), [
    ("eagle3", [], 0.3),
    ("eagle3", MUON, 0.3),
    ("eagle3", ["train.lr=1e-3"], 1.0),  # AdamW
    ("eagle3", ["train.readout_lr_ratio=0.5"], 0.5),
    ("eagle3", ["train.lr=1e-3", "train.readout_lr_ratio=0.5"], 0.5),
    ("medusa", [], 1.0),
])  # fmt: skip
def test_output_layers_learn_at_a_rate_of_their_own(small: Path, drafter: str, changes: list[str], ratio: float) -> None:
    run = prepared(small, *changes, f"drafter={{kind: {drafter}, depth: 2}}")
    trainer = run.trainers[0]
    rate = trainer.set_learning_rate(3, 6)
    rates = {id(weight): group["lr"] for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert len(rates) == len([*run.drafter.parameters()])
    layer = run.drafter.lm_head if drafter == "eagle3" else run.drafter.output_layers()[0]  # type: ignore[attr-defined]
    assert rates.pop(id(layer.weight)) == pytest.approx(ratio * rate) and rate > 0
    assert drafter != "eagle3" or {*rates.values()} == {rate}
    assert trainer.chosen.values.get("train.readout_lr_ratio", 1.0) == (1.0 if "readout" in "".join(changes) else ratio)


@pytest.mark.slow
def test_few_large_steps_are_named(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(small), "train.epochs=4", "train.batch_size=8"]) == 0
    line = re.search(r"advice    \d+ steps are few: train.batch_size=1 makes \d+ of the same text.*", capsys.readouterr().err)
    assert line is not None
    assert main([str(small), "train.epochs=5", "train.batch_size=8"]) == 0
    assert "advice" not in capsys.readouterr().err, "a run that goes on keeps its steps"
    report = report_of(tmp_path, "plan", small, "train.epochs=4", "train.batch_size=8", "--no-calibration")
    assert line[0] in capsys.readouterr().out and line[0] == f"advice    {report['advice']}"


def test_what_brings_more_in_the_same_time_is_said(small: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    wide = Backbone(LlamaForCausalLM(LlamaConfig(vocab_size=20_000, **sizes)))

    def said(changes: str, steps: int, processes: int = 1, rows: int = 1000, gpu: bool = True, **drafter: int) -> str | None:
        recipe = load_recipe(small, [f"train={{{changes}}}"])
        return advice(recipe, [build_drafter("eagle3", wide, drafter)] if drafter else [], steps, rows, processes, gpu)

    few = "150 steps are few: train.batch_size=16 makes 600 of the same text, and heads learn more from it"
    assert said("epochs: 1, batch_size: 64", 150, 4) == few
    assert "train.batch_size=4 " in str(said("epochs: 1, batch_size: 8, micro_batch: 4", 40)), "a multiple of the micro-batch"
    assert said("batch_size: 8", 300) is said("batch_size: 1", 10) is said("batch_size: 8", 40, 8) is None
    assert said("steps: 40, batch_size: 8", 40) is None, "the recipe has chosen"
    again = "52,000 steps read the same 1,000 rows 416 times: train.epochs=4 reads them 4 times"
    assert said("steps: 52000, batch_size: 8", 52_000) == again
    assert said("steps: 2000, batch_size: 8", 2000) is said("epochs: 416, batch_size: 8", 52_000) is None
    assert said("epochs: 4", 500, gpu=False, depth=7) == (
        f"7 depths of 20,000 tokens are for a GPU; headstart new-recipe {load_recipe(small).backbone.path} "
        f"--data {load_recipe(small).data.train[0].path} writes a recipe that trains faster on a CPU"
    )
    assert said("epochs: 4", 500, depth=7) is said("epochs: 4", 500, gpu=False, depth=3) is None
    assert said("epochs: 4", 500, gpu=False, depth=7, draft_vocab_size=8192) is None


def test_a_run_that_goes_on_for_longer_keeps_what_was_chosen(small: Path) -> None:
    first = prepared(small)
    assert main([str(small)]) == 0
    longer = prepared(small, "train.steps=1000000")
    assert longer.done == 6 and chosen_by(longer) == chosen_by(first)
    fresh = prepared(small, "train.steps=1000000", f"save.dir={small.parent / 'fresh'}")
    assert chosen_by(fresh) < chosen_by(first)


def test_whole_models_and_trained_heads_are_changed_by_smaller_steps(small: Path) -> None:
    recipe = load_recipe(small, ["drafter={kind: eagle3, depth: 2}"])
    fresh, model = (build_drafter(kind, backbone("llama"), {"depth": 2}) for kind in ("eagle3", "draft_model"))
    start = recipe.model_copy(update={"drafter": {**recipe.drafter, "init": "trained"}})
    rates = [choose(one, drafter, 100.0, 50).values["train.lr"] for one, drafter in ((recipe, fresh), (start, fresh), (recipe, model))]
    assert rates[1] < rates[0] and rates[2] < rates[0]


@pytest.mark.parametrize(("saved", "given", "taken"), [
    (torch.bfloat16, [], "bf16" if bf16_instructions() else "no"),
    (torch.float32, [], "no"),
    (torch.float32, ["backbone.dtype=bf16"], "bf16"),
    (torch.bfloat16, ["train.precision=no"], "no"),
])  # fmt: skip
def test_drafters_compute_in_the_backbones_precision(saved: torch.dtype, given: list[str], taken: str, small: Path, capsys: Any) -> None:
    folder = small.parent / "backbone"
    AutoModelForCausalLM.from_pretrained(folder).to(saved).save_pretrained(folder)
    assert main([str(small), "train.steps=2", *given]) == 0
    assert f"precision {taken}, 1 process" in capsys.readouterr().err
    assert f'"precision": "{taken}"' in (small.parent / "out" / "headstart.json").read_text()
    if given:
        return
    plans = [memory_plan(small, *given, *more).step(MicroBatch(2, 32)).phases for more in ([], [f"train.precision={taken}"])]
    assert plans[0] == plans[1]
    assert main([str(small), "train.steps=4", *given]) == 0  # the same run
    assert "resuming from" in capsys.readouterr().err


def test_a_frozen_readout_stays_the_backbones(small: Path) -> None:
    arguments = "drafter={kind: eagle3, depth: 2, freeze_readout: true}"
    assert main([str(small), arguments]) == 0
    run = prepared(small, arguments)
    assert torch.equal(run.drafter.lm_head.weight, run.backbone.unembed.weight)  # type: ignore[attr-defined]
    fresh = build_drafter("eagle3", run.backbone, {"depth": 2})
    assert not torch.equal(run.drafter.fc.weight, fresh.fc.weight)  # type: ignore[attr-defined]
