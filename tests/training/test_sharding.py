"""Several processes equal one, replicated (DDP) or sharded (FSDP2), backbone included; whole checkpoints, resumable on any number."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from errors import error_of
from packaging.version import Version
from safetensors.torch import load_file
from small_run import Forked, make_recipe, read_log, train_once
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from watched import watched

from headstart import load_backbone, load_recipe
from headstart.cli.train import main
from headstart.heads.checkpoint import load_drafter
from headstart.training.features import source as opened
from headstart.training.plan.fake_model import make_fake_models
from headstart.training.plan.memory import TARGET_FORWARD, MemoryPlan, MicroBatch
from headstart.training.run.processes import keep_group, shard_layers, to_local

DRAFTER = {"kind": "eagle3", "depth": 3, "draft_vocab_size": 40}
TRAIN = {"steps": 6, "batch_size": 5, "schedule": "constant", "weight_decay": 0.1, "ema_decay": 0.9}
SMALL = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2,
         "initializer_range": 0.3, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
"""The environment set by ``accelerate launch --use_fsdp --fsdp_version 2``; its launcher itself would look for GPUs."""


def launch(processes: int, recipe: Path, out: Path, *changes: str, **environment: str) -> str:
    """The output of a run on that many processes."""
    log = out.with_name(f"{out.name}.txt")
    status = Forked(processes, [str(recipe), f"save.dir={out}", *changes], log, **environment).wait()
    assert status == 0, log.read_text()[-3000:]
    return log.read_text()


def same(actual: Path, expected: Path) -> None:
    """Losses and weights are equal up to rounding, and decoded results exactly."""
    one, other = (read_log(out) for out in (actual, expected))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in one if key in line] == pytest.approx([line[key] for line in other if key in line], rel=1e-5)
    assert [line["tau"] for line in one if "tau" in line] == [line["tau"] for line in other if "tau" in line] != []
    for name, tensor in load_file(expected / "model.safetensors").items():
        torch.testing.assert_close(load_file(actual / "model.safetensors")[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module", params=["adamw", "muon"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and in ``out`` the run of one process."""
    folder = tmp_path_factory.mktemp(request.param)
    train = {**TRAIN, "optimizer": request.param}
    recipe = make_recipe(folder, 6, drafter=DRAFTER, train=train, eval={"prompts": 1, "every": 4}, save={"every": 3})
    return train_once(recipe)


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("environment", [{}, SHARDED], ids=["replicated", "sharded"])
def test_several_processes_train_as_one_does(whole: Path, tmp_path: Path, processes: int, environment: dict[str, str]) -> None:
    """Five sequences a step, one at a time: some processes have more than others."""
    output = launch(processes, whole / "recipe.yaml", tmp_path / "out", "train.micro_batch=1", **environment)
    assert f"{processes} processes on cpu{', sharded (FSDP2)' if environment else ''}\n" in output
    same(tmp_path / "out", whole / "out")
    load_drafter(tmp_path / "out", load_backbone(str(whole / "backbone"), device="cpu"))


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("processes, environment", [(2, {}), (3, SHARDED)], ids=["replicated", "sharded"])
@pytest.mark.parametrize("whole", ["muon"], indirect=True)
def test_the_backbone_is_sharded_too(whole: Path, tmp_path: Path, processes: int, environment: dict[str, str]) -> None:
    """Five sequences a step, one at a time: a process with one fewer still takes part in every forward pass."""
    output = launch(processes, whole / "recipe.yaml", tmp_path / "out", "train.micro_batch=1", "backbone.shard=true", **environment)
    assert "frozen, its layers sharded over the processes\n" in output
    same(tmp_path / "out", whole / "out")


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_files_of_a_sharded_backbone_are_read_once(tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_in_the_first(*arguments: Any, **options: Any) -> None:
        assert os.environ["RANK"] == "0", "another process reads the model's files"

    watched(monkeypatch, opened, "open_backbone", only_in_the_first)  # the processes are forked from this one
    recipe = make_recipe(tmp_path, 6, drafter=DRAFTER, train={**TRAIN, "steps": 2, "batch_size": 2}, eval={"prompts": 1})
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path / "backbone")
    launch(2, recipe, tmp_path / "sharded", "backbone.shard=true")
    launch(1, recipe, tmp_path / "whole", RANK="0")
    same(tmp_path / "sharded", tmp_path / "whole")


def test_a_process_keeps_a_part_of_each_layer_as_planned(tmp_path: Path) -> None:
    recipe = load_recipe(make_recipe(tmp_path, 6), ["backbone.shard=true"])
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())  # one of four, without communication
    try:
        model = shard_layers(AutoModelForCausalLM.from_pretrained(recipe.backbone.path), torch.device("cpu"))
        local = {name: to_local(weight).numel() for name, weight in model.named_parameters()}
        wholes = {name: weight.numel() for name, weight in model.named_parameters()}
        with torch.no_grad():
            model(input_ids=torch.arange(5)[None])
        assert {name: to_local(weight).numel() for name, weight in model.named_parameters()} == local, "gathered while it runs, not longer"
    finally:
        torch.distributed.destroy_process_group()
    layers = {name for name in wholes if ".layers." in name}
    assert layers and all(local[name] == wholes[name] / (4 if name in layers else 1) for name in wholes)
    planned = MemoryPlan(recipe, make_fake_models(recipe, False), False, False, processes=4)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert planned.persistent["backbone weights"] == 4 * sum(local.values()) + buffers
    layer = sum(wholes[name] for name in layers) // 6
    assert planned.step(MicroBatch(2, 32)).phases[TARGET_FORWARD]["gathered layer"] == 2 * 4 * layer


@pytest.mark.slow
def test_resumed_on_any_number_of_processes(whole: Path, tmp_path: Path) -> None:
    """One, then two sharded, then three replicated, then one: the order of the data is the same."""
    recipe, out = whole / "recipe.yaml", tmp_path / "out"
    assert main([str(recipe), f"save.dir={out}", "train.steps=1", "eval.prompts=1", "data.eval_rows=4"]) == 0
    assert "resuming from" in launch(2, recipe, out, "train.steps=3", "backbone.shard=true", **SHARDED)
    assert "resuming from" in launch(3, recipe, out, "train.steps=5")
    assert main([str(recipe), f"save.dir={out}"]) == 0
    assert [line["step"] for line in read_log(out) if "loss" in line] == list(range(1, 7))
    logs = [[line["loss"] for line in read_log(folder) if "loss" in line] for folder in (out, whole / "out")]
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    for name, tensor in load_file(whole / "out" / "model.safetensors").items():
        torch.testing.assert_close(load_file(out / "model.safetensors")[name], tensor, rtol=1e-4, atol=1e-5)


def test_what_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path, 6)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "launched with FSDP version 1; training supports version 2" in error_of(capsys, "train", recipe)
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert main([str(recipe), "train.steps=1"]) == 0  # one process has nothing to shard


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the processes train together, and nothing is refused")
@pytest.mark.skipif(Version(accelerate.__version__) < Version("1.13"), reason="accelerate before 1.13 trains these together")
def test_training_each_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = error_of(capsys, "train", make_recipe(tmp_path, 6))
    assert "2 processes were started and found no accelerator, so each would train alone" in error


def test_processes_that_cannot_meet_are_refused(tmp_path: Path) -> None:
    run = Forked(1, [str(make_recipe(tmp_path, 6))], log := tmp_path / "log", WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", MASTER_ADDR="")
    assert run.wait() == 2 and "error: accelerate cannot train here" in log.read_text() and "MASTER_ADDR" in log.read_text()


def test_the_process_group_outlives_the_run() -> None:
    """The last holder must not be DDP's reducer, whose end can wait for gloo's threads and they for it (one run in ten on a busy CPU)."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    group = weakref.ref(torch.distributed.group.WORLD)
    keep_group()
    torch.distributed.destroy_process_group()
    gc.collect()
    assert group() is not None
