"""``headstart plan``: its memory estimate matches a real step, a recipe that fits fits, and errors are one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from errors import error_of, refuses, report_of
from families import build as build_model
from small_run import make_recipe, memory_plan
from test_hybrid import CONFIGS
from tiny_models import tiny_model

from headstart import load_recipe, load_tokenizer
from headstart.cli.main import main
from headstart.training.data.kept import Splits
from headstart.training.plan.duration import best_chain, likely, tau
from headstart.training.plan.fake_model import make_fake_models
from headstart.training.plan.memory import DRAFT_STEP, TARGET_FORWARD, MemoryPlan, MicroBatch
from headstart.training.plan.plan import disk, find_machine, largest, read_data
from headstart.training.plan.table import lines, time_lines
from headstart.training.setup import prepare


@pytest.mark.parametrize("limit,expected", [(1050, 10), (149, 0), (150, 1), (10**9, 500), (1149, 10), (5050, 50), (49, 0)])
def test_the_largest_that_fits(limit: int, expected: int) -> None:
    sizes: list[int] = []

    def most(n: int) -> int:
        sizes.append(n)
        return 50 + 100 * n

    assert largest(most, 50, 7, limit, 500) == expected
    assert len(sizes) <= 3 and max(sizes, default=0) <= 500


def test_the_largest_of_a_curve_fits() -> None:
    assert 97 <= largest(lambda n: n * n, 0, 3, 10_000, 10**6) <= 100


@pytest.mark.parametrize("kind", ["gemma3n_text", "qwen4_exp_text"])
def test_a_model_that_asks_for_values(kind: str, small: Path, tmp_path: Path) -> None:
    """Gemma 3n takes a threshold from torch's normal distribution, which checks its parameters; Qwen4 chooses keys in a loop."""
    tiny_model(kind).save_pretrained(tmp_path / "model")
    phases = memory_plan(small, f"backbone.path={tmp_path / 'model'}", "data.train=not/here").step(MicroBatch(2, 24)).phases
    assert phases[TARGET_FORWARD]["backbone activations"] > 10_000


def test_the_command(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, "plan", small, "train.epochs=2", "train.steps=null", "save.keep=3", "--no-calibration", "--memory", "2")
    out = capsys.readouterr().out
    assert report["memory"]["fits"] and report["memory"]["advice"] is None and "fits      " in out
    assert report["tokens"]["samples"] == 36 and report["tokens"]["steps"] == 18 and "18 steps" in out
    assert report["tokens"]["training_tokens"] == 2 * report["tokens"]["tokens"]
    assert report["fits"]["rows"] > 100 and report["fits"]["length"] == 128, "as long as the backbone's context"
    assert report["disk"]["states"] > 3 * report["disk"]["heads"]
    assert report["time"] is None and "--no-calibration" in report["time_unavailable"]
    assert sum(report["memory"]["phases"][DRAFT_STEP].values()) <= report["memory"]["peak"] < 2e9
    assert "decoding  none, since" in lines(report | {"decoding": "none, since"}), "of a backbone that decodes no drafts"
    assert report["decoding"] is None and not (small.parent / "out").exists(), "nothing is trained"


@pytest.mark.slow
def test_what_does_not_fit_is_said(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    crowded = ["train.batch_size=512", "--memory", "0.51"]
    report = report_of(tmp_path, "plan", small, *crowded)
    out = capsys.readouterr().out
    assert not report["memory"]["fits"] and "does not fit: " in out and report["time_unavailable"] == "it does not fit"
    rows = report["fits"]["rows"]
    assert 0 < rows < 512 and f"train.micro_batch={rows}" in out and "largest part is torch runtime" in out
    assert report_of(tmp_path, "plan", small, f"train.batch_size={rows}", "--memory", "0.51", "--no-calibration")["memory"]["fits"]
    report = report_of(tmp_path, "plan", small, "--memory", "0.1")
    assert report["fits"]["rows"] == report["fits"]["length"] == 0 and "nothing fits" in capsys.readouterr().out


@pytest.mark.slow
def test_gpus_share_the_batch(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, "plan", small, "--gpus", "2", "--memory", "8")
    assert report["micro_batch"]["rows"] == 2 and report["machine"]["processes"] == 2
    assert report["fits"]["batch_size"] == 2 * report["fits"]["rows"]
    assert report["memory"]["phases"][TARGET_FORWARD]["gradients"] > 0, "those in the buckets"
    if not torch.accelerator.is_available():
        assert "no accelerator to time it" in report["time_unavailable"]
    assert "2 x " in capsys.readouterr().out


def test_real_steps_are_timed_and_nothing_is_kept(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(tmp_path, "plan", small)
    assert report["time"]["seconds_per_step"] > 0
    assert report["time"]["hours"] == pytest.approx(12 * report["time"]["seconds_per_step"] / 3600)
    out = capsys.readouterr().out
    assert "s per step" in out and not (small.parent / "out").exists()
    [gain] = report["gain"].values()
    assert gain["step_ms"] > 0 and all(parts["verify_ms"] > 0 for parts in gain["chains"].values())
    assert set(gain["expected"]) == {"0.4", "0.6", "0.8"} and "pays      " in out


def test_from_a_cache_the_model_is_not_loaded(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cached = ["drafter.kind=eagle3", f"cache.dir={tmp_path / 'cache'}"]
    assert main(["cache", str(small), *cached]) == 0
    report = report_of(tmp_path, "plan", small, *cached)
    assert report["time"]["seconds_per_step"] > 0 and "cache.dir=null" in report["gain"][""]
    assert "pays      not known here: features come from a cache" in capsys.readouterr().out


def test_what_is_likely_stands_first() -> None:
    """By label tokens: of few nothing is known, and between two that were measured it rises."""
    few, some, more, many = map(likely, (1000, 46_000, 60_000, 10**9))
    assert few is None and some is not None and more is not None and many is not None and 0 < some < more < many < 1
    at = {"depth": 4, "tau": 1.6, "speedup": 1.3}
    gain = {"break_even": 0.1, "expected": {0.4: at | {"speedup": 1.4}, more: at}, "likely": more, "step_ms": 40.0}
    time = {"hours": 1.0, "seconds_per_step": 2.0, "without_cache": False, "other_programs": 0.0}
    [line] = time_lines({"time": time, "gain": {"": gain}, "machine": {"processes": 1}})[1:]
    assert line.startswith(f"pays      likely 1.30 x with {more:.0%} (4 drafted, tau 1.60), if the answers are the model's own; from 10%")
    assert "; 1.40 x with 40%" in line


def test_what_acceptance_brings_follows_from_costs() -> None:
    """By hand: a chain of one at 1.25 steps, of four at 1.6, of eight at 3."""
    costs = {1: 1.25, 4: 1.6, 8: 3.0}
    assert best_chain(0.4, costs) == (1, pytest.approx(1.4 / 1.25))
    assert best_chain(0.8, costs) == (4, pytest.approx((1 + 0.8 + 0.64 + 0.512 + 0.4096) / 1.6))
    assert best_chain(0.0, costs) == (1, pytest.approx(0.8)), "nothing accepted: the cheapest chain, slower than without drafts"
    assert tau(1.0, 4) == 5 and best_chain(1.0, costs)[0] == 4, "nine tokens in three steps are fewer than five in 1.6"


def test_a_configuration_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path / "all")
    for path in (tmp_path / "all" / "backbone").iterdir():
        if path.name != "config.json":
            path.unlink()
    report = report_of(tmp_path, "plan", recipe)
    assert report["memory"]["peak"] > 0 and report["tokens"]["tokens"] is None and report["micro_batch"]["length"] == 64
    assert "no tokenizer" in report["data_unavailable"] or "cannot load tokenizer" in report["data_unavailable"]
    assert "weights" in report["time_unavailable"] and "data      none yet" in capsys.readouterr().out


def test_what_is_written_to_disk(small: Path) -> None:
    splits = read_data(load_recipe(small), make_fake_models(load_recipe(small), False))
    assert isinstance(splits, Splits)
    models = make_fake_models(load_recipe(small, ["drafter.kind=eagle3"]), False)

    machine = find_machine(None, None)

    def written(*overrides: str) -> dict[str, Any]:
        return disk(MemoryPlan(load_recipe(small, ["drafter.kind=eagle3", *overrides]), models, False, False), splits, machine)

    plain = written()
    assert plain["states"] == 3 * (3 * plain["heads"]) > written("train.optimizer=muon")["states"]
    assert written("save.keep=4", "train.ema_decay=0.9")["states"] == 5 * (4 * plain["heads"])
    kept = written("train.steps=null", "train.epochs=2")["between_epochs"]
    assert kept == written("cache.dir=x", "cache.dtype=exact")["features"]
    assert not written("train.steps=null", "train.epochs=1")["between_epochs"]
    assert written("cache.dir=x", "cache.dtype=exact")["features"] > 2 * written("cache.dir=x")["features"] > 0
    assert written("regenerate.out=x.jsonl")["answers"] > written("regenerate.out=x.jsonl", "regenerate.limit=4")["answers"] > 0


def test_a_mistake_is_one_line(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "made" / "plan.json"
    for arguments, message in (
        (["--gpus", "0"], "--gpus is a whole number of at least 1; got 0"),
        (["--memory", "-1"], "--memory is a number of gigabytes above 0 and at most 1000000; got -1"),
        (["--memory", "nan"], "--memory is a number"),
        (["--gpus", "5", "--memory", "80"], "train.batch_size=4 leaves some of 5 GPUs"),
        (["data.max_length=129"], "data.max_length=129 is longer than the backbone's context of 128"),
    ):
        assert message in error_of(capsys, "plan", small, *arguments, "--json", file)
        assert not file.parent.exists()


def test_packing_for_recurrent_layers_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    build_model(*CONFIGS["qwen3_next"]).save_pretrained(tmp_path / "hybrid")
    load_tokenizer("embedded").save_pretrained(tmp_path / "hybrid")
    packed = load_recipe(recipe, [f"backbone.path={tmp_path / 'hybrid'}", "data.packing=true"])
    refuses(r"recurrent layers, which follow no mask: no packing \(data.packing=false\)", prepare, packed)
    assert main(["plan", str(recipe), f"backbone.path={tmp_path / 'hybrid'}", "data.packing=true"]) == 2
