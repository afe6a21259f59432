"""``headstart plan``: what it says of memory is what a step takes, what fits fits, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build as build_model
from small_run import make_recipe
from test_hybrid import CONFIGS
from torch.profiler import ProfilerActivity, profile

from headstart.cli.main import main
from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.methods import methods
from headstart.support.errors import UserError
from headstart.training.data.data import Splits
from headstart.training.data.packing import Batch
from headstart.training.features.source import LiveFeatures
from headstart.training.objective.anchors import StepKey
from headstart.training.plan.fake_model import draw
from headstart.training.plan.memory import Memory, Size
from headstart.training.plan.memory_counter import Live as Counted
from headstart.training.plan.plan import disk, largest, read_data
from headstart.training.recipe.recipe import Recipe, load_recipe
from headstart.training.run.step import TrainStep
from headstart.training.run.trainer import build
from headstart.training.setup import prepare
from tests.block_head import BlockHead

LASTING = ("torch itself", "backbone weights", "drafter weights", "optimiser state", "average")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("small"))


def allocated(work: Any) -> int:
    """The most bytes that torch's own allocator had given out at a time while ``work`` ran, by its own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = work()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del kept
    return most


def real_step(recipe: Recipe, size: Size) -> dict[str, int]:
    """What a real step takes beside the lasting, by phase."""
    backbone = load_backbone(recipe.backbone.path, attention=recipe.backbone.attention)
    drafter = build(recipe, backbone)
    tokens_BT = torch.randint(0, backbone.vocab, (size.rows, size.length))
    document_BT = torch.zeros_like(tokens_BT)
    members: tuple[tuple[int, ...], ...] = ((0,),) * size.rows
    if recipe.data.packing:
        document_BT[:, -1] = 1
        members = ((0, 1),) * size.rows
    batch = Batch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), document_BT, members)
    source, step = LiveFeatures(backbone, drafter.taps), TrainStep(backbone, drafter, recipe.objective)
    bf16 = recipe.train.precision == "bf16"

    def learn() -> None:
        features = source.read(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = step(features, StepKey(0, 0)).loss
        del features
        loss.backward()

    reading = allocated(lambda: source.read(batch))
    learn()   # what torch sets up once is none of a step's
    drafter.zero_grad()
    return {"reading": reading, "step": allocated(learn)}


CASES: dict[str, tuple[list[str], Size]] = {
    "medusa": (["drafter.depth=3"], Size(4, 96)),
    "eagle3": (["drafter.kind=eagle3", "drafter.depth=3"], Size(4, 96)),
    "many rows": (["drafter.kind=eagle3", "drafter.depth=2"], Size(24, 20)),
    "draft vocabulary": (["drafter.kind=eagle3", "drafter.draft_vocab_size=50"], Size(2, 120)),
    "packed": (["drafter.kind=eagle3", "data.packing=true"], Size(3, 120)),
    "bf16": (["drafter.kind=eagle3", "train.precision=bf16"], Size(4, 96)),
    "small chunks": (["objective.chunk_size=16", "objective.terms={ce: 0.1, tv: 0.9}"], Size(4, 100)),
    "expected": (["objective.depth_weights=expected"], Size(4, 100)),
    "computed again": (["drafter.kind=eagle3", "train.gradient_checkpointing=true"], Size(4, 96)),
    "eager": (["backbone.attention=eager"], Size(2, 120)),
    "anchors": (["drafter={kind: tests.block_head}"], Size(4, 120)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_the_plan_says(name: str, small: Path) -> None:
    overrides, size = CASES[name]
    recipe = load_recipe(small, overrides)
    phases = Memory(recipe, draw(recipe, False), False, False).step(size).phases
    measured = real_step(recipe, size)
    planned = {phase: sum(count for part, count in parts.items() if part not in LASTING) for phase, parts in phases.items()}
    assert 0.7 <= measured["reading"] / planned["reading"] <= 1.5, (measured, planned)
    assert 0.7 <= measured["step"] / max(planned["reading"], planned["learning"]) <= 1.5, (measured, planned)


def test_the_lasting_parts_are_those_of_the_real_thing(small: Path, tmp_path: Path) -> None:
    overrides = ["drafter.kind=eagle3", "train.ema_decay=0.9", "train.optimizer=muon", f"save.dir={tmp_path}"]
    recipe = load_recipe(small, overrides)
    parts = Memory(recipe, draw(recipe, False), False, False).lasting()
    run = prepare(recipe)
    weights = [weight for weight in run.drafter.parameters() if weight.requires_grad]
    trained = 4 * sum(weight.numel() for weight in weights)
    matrices = 4 * sum(w.numel() for w in weights if w.ndim == 2 and run.backbone.vocab not in w.shape)
    assert parts["backbone weights"] >= 4 * sum(weight.numel() for weight in run.backbone.model.parameters())
    assert parts["backbone weights"] < 1.02 * 4 * sum(weight.numel() for weight in run.backbone.model.parameters())
    assert parts["drafter weights"] == parts["average"] == trained
    assert parts["optimiser state"] == 2 * trained - matrices
    run.log.close()


@pytest.mark.parametrize("kind", methods())
def test_every_drafter_can_be_planned(kind: str, small: Path) -> None:
    for accelerator in (False, True):
        recipe = load_recipe(small, [f"drafter={{kind: {kind}}}"])
        taken = Memory(recipe, draw(recipe, accelerator), accelerator, True).step(Size(2, 32))
        assert taken.phases["learning"]["drafter activations"] > 0 and taken.phases["learning"]["objective"] > 0


def test_several_heads_learn_one_after_another(small: Path) -> None:
    alone = [load_recipe(small, [f"drafter={{kind: {kind}, depth: 2}}"]) for kind in ("eagle3", "medusa")]
    both = load_recipe(small, ["drafter={}", "heads={eagle3: {kind: eagle3, depth: 2}, medusa: {kind: medusa, depth: 2}}"])
    one, two, together = (Memory(recipe, draw(recipe, False), False, False).step(Size(4, 60)) for recipe in (*alone, both))
    for part in ("drafter weights", "optimiser state"):
        assert together.phases["learning"][part] == one.phases["learning"][part] + two.phases["learning"][part]
    activations = [taken.phases["learning"]["drafter activations"] for taken in (one, two, together)]
    assert activations[2] == activations[0] > activations[1]


def test_a_share_of_the_positions_takes_a_share_of_the_memory(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, objective = load_recipe(small, ["drafter={kind: tests.block_head}", "objective.chunk=16"]), {}
    for share in (0.1, 0.4):
        monkeypatch.setattr(BlockHead, "anchor_share", share)
        phases = Memory(recipe, draw(recipe, False), False, False).step(Size(4, 2000)).phases
        objective[share] = phases["learning"]["objective"]
    assert 2.5 < objective[0.4] / objective[0.1] < 4.5


def test_more_rows_and_longer_ones_take_more(small: Path) -> None:
    recipe = load_recipe(small, ["drafter.kind=eagle3"])
    memory = Memory(recipe, draw(recipe, False), False, False)
    most = [memory.step(size).most for size in (Size(2, 32), Size(4, 32), Size(4, 64), Size(4, 64, 0.5))]
    assert most[0] < most[1] < most[2] > most[3]


@pytest.mark.parametrize("limit,expected", [(1050, 10), (149, 0), (150, 1), (10**9, 500), (1149, 10), (5050, 50), (49, 0)])
def test_the_largest_that_fits(limit: int, expected: int) -> None:
    asked: list[int] = []

    def most(n: int) -> int:
        asked.append(n)
        return 50 + 100 * n

    assert largest(most, 50, 7, limit, 500) == expected
    assert len(asked) <= 3 and max(asked, default=0) <= 500


def test_the_largest_of_a_curve_fits() -> None:
    assert 97 <= largest(lambda n: n * n, 0, 3, 10_000, 10**6) <= 100


def planned(small: Path, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "plan.json"
    assert main(["plan", str(small), *arguments, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_the_command(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(small, tmp_path, "train.epochs=2", "train.steps=null", "save.keep=3", "--no-calibration", "--memory", "2")
    out = capsys.readouterr().out
    assert report["memory"]["fits"] and report["advice"] is None and "fits      " in out
    assert report["tokens"]["samples"] == 36 and report["tokens"]["steps"] == 18 and "18 steps" in out
    assert report["tokens"]["trained_on"] == 2 * report["tokens"]["tokens"]
    assert report["fits"]["rows"] > 100 and report["fits"]["length"] == 128, "as long as the backbone's context"
    assert report["disk"]["states"] > 3 * report["disk"]["heads"] and report["time"] is None and "--no-calibration" in report["no_time"]
    assert sum(report["memory"]["phases"]["learning"].values()) <= report["memory"]["most"] < 2e9
    assert not (small.parent / "out").exists(), "nothing is trained"


def test_what_does_not_fit_is_said(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crowded = ["train.batch_size=512", "--memory", "0.51"]
    report = planned(small, tmp_path, *crowded)
    out = capsys.readouterr().out
    assert not report["memory"]["fits"] and "does not fit: " in out and report["no_time"] == "it does not fit"
    rows = report["fits"]["rows"]
    assert 0 < rows < 512 and f"train.micro_batch={rows}" in out and "largest part is torch itself" in out
    assert planned(small, tmp_path, f"train.batch_size={rows}", "--memory", "0.51", "--no-calibration")["memory"]["fits"]
    report = planned(small, tmp_path, "--memory", "0.1")
    assert report["fits"]["rows"] == report["fits"]["length"] == 0 and "nothing fits" in capsys.readouterr().out


def test_gpus_share_the_batch(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(small, tmp_path, "--gpus", "2", "--memory", "8")
    assert report["micro_batch"]["rows"] == 2 and report["machine"]["processes"] == 2
    assert report["fits"]["batch_size"] == 2 * report["fits"]["rows"]
    assert report["memory"]["phases"]["reading"]["gradients"] > 0, "those in the buckets"
    if not torch.accelerator.is_available():
        assert "no accelerator to time it" in report["no_time"]
    assert "2 x " in capsys.readouterr().out


def test_real_steps_are_timed_and_nothing_is_kept(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = planned(small, tmp_path)
    assert report["time"]["seconds_a_step"] > 0
    assert report["time"]["hours"] == pytest.approx(12 * report["time"]["seconds_a_step"] / 3600)
    assert "s a step" in capsys.readouterr().out and not (small.parent / "out").exists()


def test_a_configuration_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path / "all")
    for path in (tmp_path / "all" / "backbone").iterdir():
        if path.name != "config.json":
            path.unlink()
    report = planned(recipe, tmp_path)
    assert report["memory"]["most"] > 0 and report["tokens"]["tokens"] is None and report["micro_batch"]["length"] == 64
    assert "no tokenizer" in report["not_read"] or "cannot load tokenizer" in report["not_read"]
    assert "weights" in report["no_time"] and "data      not here" in capsys.readouterr().out


def test_what_is_written_to_disk(small: Path) -> None:
    splits = read_data(load_recipe(small), draw(load_recipe(small), False))
    assert isinstance(splits, Splits)
    sketch = draw(load_recipe(small, ["drafter.kind=eagle3"]), False)

    def written(*overrides: str) -> dict[str, Any]:
        return disk(load_recipe(small, ["drafter.kind=eagle3", *overrides]), sketch, splits)

    plain = written()
    assert plain["states"] == 3 * (3 * plain["heads"]) > written("train.optimizer=muon")["states"]
    assert written("save.keep=4", "train.ema_decay=0.9")["states"] == 5 * (4 * plain["heads"])
    assert written("cache.dir=x", "cache.dtype=exact")["features"] > 2 * written("cache.dir=x")["features"] > 0
    assert written("regenerate.out=x.jsonl")["answers"] > written("regenerate.out=x.jsonl", "regenerate.limit=4")["answers"] > 0


def test_features_from_a_cache_need_no_reading(small: Path) -> None:
    for teacher in ("hidden", "topk"):
        recipe = load_recipe(small, ["drafter.kind=eagle3", "cache.dir=x", f"cache.teacher={teacher}"])
        phases = Memory(recipe, draw(recipe, False), False, False).step(Size(2, 32)).phases
        assert "backbone activations" not in phases["reading"] and phases["learning"]["features"] > 0


MISTAKES = {
    "no gpus": (["--gpus", "0"], "--gpus is a whole number of at least 1; got 0"),
    "negative memory": (["--memory", "-1"], "--memory is a number of gigabytes above 0; got -1"),
    "memory of nan": (["--memory", "nan"], "--memory is a number"),
    "too many gpus": (["--gpus", "5", "--memory", "80"], "train.batch_size=4 leaves some of 5 GPUs"),
    "no such drafter": (["drafter.kind=meduso"], "did you mean 'medusa'"),
    "no such argument": (["drafter.dept=3"], "did you mean drafter.depth?"),
    "no such backbone": (["backbone.path=./gone"], "no configuration of backbone './gone'"),
    "no such data": (["data.train=gone.jsonl"], "no data file gone.jsonl"),
    "over the context": (["data.max_length=129"], "data.max_length=129 is longer than the backbone's context of 128"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line(name: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said = MISTAKES[name]
    file = tmp_path / "made" / "plan.json"
    assert main(["plan", str(small), *arguments, "--json", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and printed.err.count("\n") == 1, printed.err
    assert not file.parent.exists()


def test_a_recipe_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path / "gone.yaml")]) == 2
    assert "gone.yaml: there is no such file" in capsys.readouterr().err


def test_packing_for_recurrent_layers_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    name, settings = CONFIGS["qwen3_next"]
    model = build_model(name, settings)
    model.save_pretrained(tmp_path / "hybrid")
    packed = load_recipe(recipe, [f"backbone.path={tmp_path / 'hybrid'}", "data.packing=true", "data.train=gone.jsonl"])
    with pytest.raises(UserError, match=r"recurrent layers, which follow no mask: no packing \(data.packing=false\)"):
        prepare(packed)
    with pytest.raises(UserError, match="data.packing=false"):
        tokens_BT = torch.zeros(1, 3, dtype=torch.int64)
        LiveFeatures(Backbone(model), ()).backbone.read(tokens_BT, attention_mask={"full_attention": torch.ones(1, 3, 3)})
    assert main(["plan", str(recipe), f"backbone.path={tmp_path / 'hybrid'}", "data.packing=true"]) == 2


def test_what_is_counted_is_freed() -> None:
    with Counted() as live:
        live.part = "a"
        kept = torch.zeros(100)
        live.part = "b"
        for _ in range(3):
            torch.ones(50)
    assert live.now == 400 and live.most == 600 and live.parts([kept]) == {"gradients": 400, "b": 200}
