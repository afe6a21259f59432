"""The stages and losses of joint training (Medusa-2, 2401.10774 section 2.2.2): heads alone, the ramp, KL, recomputed activations."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, random_drafter, texts, tiny
from safetensors.torch import load_file
from small_run import make_recipe, memory_plan, prepared, read_log
from transformers import AutoModelForCausalLM

from headstart import Backbone, Features
from headstart.cli.train import main
from headstart.training.data.batches import Batch
from headstart.training.data.data import load_data
from headstart.training.features.source import LiveFeatures
from headstart.training.objective.loss_rows import StepKey, lm_loss
from headstart.training.plan.memory import DRAFT_STEP, MicroBatch
from headstart.training.recipe.sections import Lora
from headstart.training.recipe.training import Objective
from headstart.training.run.optimizer import adapter_rise
from headstart.training.run.trainer import JointStep, recompute

ALL = {"target_modules": "all-linear"}


def adapted(family: str = "llama", **config: Any) -> Backbone:
    """A backbone with a trainable adapter whose weights are all random."""
    on = Backbone(peft.get_peft_model(tiny(family), peft.LoraConfig(r=2, **ALL | config)), trainable=True)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, weight in on.trainable.items():
            if "magnitude" not in name:
                weight.normal_(std=0.2)
    return on


def test_the_stages_are_functions_of_the_step() -> None:
    def rises(**settings: float) -> list[float]:
        return [round(adapter_rise(step, 10, Lora(**settings)), 3) for step in range(1, 11)]  # type: ignore[arg-type]

    assert rises() == [1.0] * 10
    assert rises(warmup_ratio=0.3) == [0.0] * 3 + [1.0] * 7
    ramp = rises(warmup_ratio=0.2, ramp_ratio=0.3)
    assert ramp[:2] == [0.0, 0.0] and ramp[5:] == [1.0] * 5
    assert 0 < ramp[2] < ramp[3] < ramp[4] < 1 and ramp[3] == pytest.approx(0.5**0.5, abs=1e-3)


def test_the_first_stage_trains_the_heads_as_alone(tmp_path: Path) -> None:
    lora = {"rank": 2, "warmup_ratio": 0.5, "ramp_ratio": 0.3, "kl_weight": 1.0}
    recipe = make_recipe(tmp_path, backbone={"lora": lora}, train={"steps": 6}, save={"every": 3, "keep": 9}, eval={"every": 3})
    assert main([str(recipe)]) == 0
    assert main([str(recipe), "backbone.lora=null", "cache.between_epochs=false", f"save.dir={tmp_path}/alone"]) == 0
    both, alone = (load_file(tmp_path / folder / "state/step-00000003/tensors.safetensors") for folder in ("out", "alone"))
    assert all(torch.equal(both[name], tensor) for name, tensor in alone.items())
    added = {name: tensor for name, tensor in both.items() if name not in alone}
    assert added and all(name.startswith("adapter/") for name in added), "no moments of the adapter yet"
    assert not any(tensor.any() for name, tensor in added.items() if "lora_B" in name)
    last = load_file(tmp_path / "out/state/step-00000006/tensors.safetensors")
    assert all(tensor.any() for name, tensor in last.items() if name.startswith("adapter/"))
    first, second = (line for line in read_log(tmp_path / "out") if "tau" in line)
    assert first["backbone_loss"] == first["backbone_loss_before"] == second["backbone_loss_before"] != second["backbone_loss"]
    assert not [line for line in read_log(tmp_path / "alone") if "backbone_loss" in line]
    assert_loss_of(tmp_path, recipe, second["backbone_loss_before"], second["backbone_loss"])


def assert_loss_of(folder: Path, recipe: Path, before: float, after: float) -> None:
    """What evaluations report is transformers' own loss on the held-out rows, without and with the saved adapter."""
    run = prepared(recipe)
    rows = load_data(run.recipe.data, run.tokenizer, 128, progress=False).eval
    bare = AutoModelForCausalLM.from_pretrained(folder / "backbone")
    with_adapter = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "backbone"), str(folder / "out/adapter"))
    for model, reported in ((bare, before), (with_adapter.merge_and_unload(), after)):  # the adapter merged, as one would serve it
        total, count = 0.0, 0
        for row in rows:
            logits = model(row.tokens[None]).logits[0, 1:-1]
            total, count = total + F.cross_entropy(logits, row.tokens[2:], reduction="sum").item(), count + len(logits)
        assert reported == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize("chunk", [3, 100])
def test_kl_is_that_of_the_two_models(chunk: int) -> None:
    on, tokens = adapted(), texts(2, 9)
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    mask[:, :2] = False
    with on.without_adapter():
        assert all(not weight.requires_grad for weight in on.model.parameters())
        original_BTD = on.read(tokens).hidden_BTD.detach()
    assert torch.equal(original_BTD, Backbone(tiny("llama")).read(tokens).hidden_BTD)
    assert all(weight.requires_grad for weight in on.trainable.values())
    features = Features(tokens, on.read(tokens).hidden_BTD, None, mask, torch.zeros_like(tokens))
    found = lm_loss(on, features, chunk, original_BTD)
    with on.without_adapter():
        p_MV = on.model(tokens).logits[:, :-1][mask[:, 1:]].detach().softmax(-1)
    q_MV = on.model(tokens).logits[:, :-1][mask[:, 1:]].softmax(-1)
    expected = (p_MV * (p_MV / q_MV).log()).sum()
    torch.testing.assert_close(found.kl, expected, atol=1e-4, rtol=1e-4)
    weights = list(on.trainable.values())
    for actual, wanted in zip(torch.autograd.grad(found.kl, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-3)
    assert found.cross_entropy > 0 and lm_loss(on, features, chunk).kl == 0


def gradients(on: Backbone, recomputed: bool) -> tuple[list[torch.Tensor], int]:
    """Gradients of a joint step, and how often a layer ran."""
    drafter = random_drafter("medusa", on).requires_grad_(True)
    batch = Batch(texts(2, 12), torch.ones(2, 12, dtype=torch.bool), torch.zeros(2, 12, dtype=torch.int64), ((0,), (1,)))
    step = JointStep(LiveFeatures(on, ()), drafter, Objective(), Lora(kl_weight=0.5))
    if recomputed:
        recompute(drafter)
    calls = []
    handle = on.layers[1].get_submodule("mlp").register_forward_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(3)
    weights = [*on.trainable.values(), *drafter.parameters()]
    found = torch.autograd.grad(step(batch, StepKey(0, 1), 1.0).loss, weights)
    handle.remove()
    return list(found), len(calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_give_the_same_gradients(family: str) -> None:
    on = adapted(family, lora_dropout=0.3)
    kept, once = gradients(on, recomputed=False)
    again, twice = gradients(on, recomputed=True)
    assert (once, twice) == (2, 3), "one pass without the adapter, one with it, and one in the backward"
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert "forward" not in vars(on.layers[0]) and not on.read(texts(1, 5)).hidden_BTD.isnan().any()


@pytest.mark.slow
def test_a_plan_counts_the_trained_backbone(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, 6, backbone={"lora": {"rank": 4, "dropout": 0.1}}, train={"ema_decay": 0.9})
    size = MicroBatch(8, 64)
    frozen, joint = memory_plan(recipe, "backbone.lora=null"), memory_plan(recipe)
    adapter = sum(weight.numel() * 4 for weight in joint.models.backbone.trainable.values())
    persistent, before = joint.persistent, frozen.persistent
    assert persistent["optimizer state"] - before["optimizer state"] == 2 * adapter
    assert persistent["weight average"] - before["weight average"] == adapter
    phases = [one.step(size).phases[DRAFT_STEP] for one in (frozen, joint)]
    assert "backbone activations" not in phases[0]
    kept = 8 * 64 * 4 * 6 * (2 * 16 + 3 * 32)  # of 6 layers, in fp32: at least two states of the width and three of the feed-forward
    assert phases[1]["backbone activations"] > kept
    assert memory_plan(recipe, "backbone.lora.kl_weight=1", "backbone.lora.use_dora=true").step(size).peak >= joint.step(size).peak
    again = memory_plan(recipe, "train.gradient_checkpointing=true").step(size).phases[DRAFT_STEP]
    assert again["backbone activations"] < phases[1]["backbone activations"] / 3
