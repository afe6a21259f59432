"""The memory planned for a step against the allocations of a real one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import memory_plan, prepared
from torch.profiler import ProfilerActivity, profile

from headstart.heads.backbone.backbone import load_backbone
from headstart.heads.methods import methods
from headstart.training.data.batches import Batch
from headstart.training.features.source import LiveFeatures
from headstart.training.objective.loss_rows import StepKey
from headstart.training.objective.objective import TrainStep
from headstart.training.plan.duration import step_operations
from headstart.training.plan.fake_model import make_fake_models
from headstart.training.plan.memory import DRAFT_STEP, TARGET_FORWARD, MemoryPlan, MicroBatch
from headstart.training.recipe.recipe import Recipe, load_recipe
from headstart.training.run.trainer import build

DTYPES = ("fp32", "int8", "int4")
PERSISTENT = ("torch runtime", "backbone weights", "drafter weights", "optimizer state", "weight average")


def allocated(work: Any) -> int:
    """Peak bytes allocated by torch while ``work`` ran, from the profiler's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = work()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del kept
    return most


def real_step(recipe: Recipe, size: MicroBatch) -> dict[str, int]:
    """Peak memory of a real step, by phase, without the persistent part."""
    backbone = load_backbone(recipe.backbone.path, attention=recipe.backbone.attention)
    drafter = build(recipe, backbone)
    tokens_BT = torch.randint(0, backbone.vocab, (size.rows, size.length))
    document_BT = torch.zeros_like(tokens_BT)
    members: tuple[tuple[int, ...], ...] = ((0,),) * size.rows
    if recipe.data.packing:
        document_BT[:, -1] = 1
        members = ((0, 1),) * size.rows
    batch = Batch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), document_BT, members)
    source, step = LiveFeatures(backbone, drafter.taps), TrainStep(drafter, recipe.objective)
    bf16 = recipe.train.precision == "bf16"

    def learn() -> None:
        features = source.read(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = step(features, StepKey(0, 0)).loss
        del features
        loss.backward()

    reading = allocated(lambda: source.read(batch))
    learn()  # one-time allocations of torch do not belong to a step
    drafter.zero_grad()
    return {TARGET_FORWARD: reading, "step": allocated(learn)}


CASES: dict[str, tuple[list[str], MicroBatch]] = {
    "medusa": (["drafter.depth=3"], MicroBatch(4, 96)),
    "eagle3": (["drafter.kind=eagle3", "drafter.depth=3"], MicroBatch(4, 96)),
    "many rows": (["drafter.kind=eagle3", "drafter.depth=2"], MicroBatch(24, 20)),
    "draft vocabulary": (["drafter.kind=eagle3", "drafter.draft_vocab_size=50"], MicroBatch(2, 120)),
    "packed": (["drafter.kind=eagle3", "data.packing=true"], MicroBatch(3, 120)),
    "bf16": (["drafter.kind=eagle3", "train.precision=bf16"], MicroBatch(4, 96)),
    "small chunks": (["objective.chunk_size=16", "objective.terms={ce: 0.1, tv: 0.9}"], MicroBatch(4, 100)),
    "expected": (["objective.depth_weights=expected"], MicroBatch(4, 100)),
    "computed again": (["drafter.kind=eagle3", "train.gradient_checkpointing=true"], MicroBatch(4, 96)),
    "eager": (["backbone.attention=eager"], MicroBatch(2, 120)),
    "anchors": (["drafter={kind: tests.helpers.block_head}"], MicroBatch(4, 120)),
}


@pytest.mark.matrix(cells=2)
@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_what_the_plan_says(name: str, small: Path) -> None:
    overrides, size = CASES[name]
    phases = memory_plan(small, *overrides).step(size).phases
    measured = real_step(load_recipe(small, overrides), size)
    planned = {phase: sum(count for part, count in parts.items() if part not in PERSISTENT) for phase, parts in phases.items()}
    assert 0.7 <= measured[TARGET_FORWARD] / planned[TARGET_FORWARD] <= 1.5, (measured, planned)
    assert 0.7 <= measured["step"] / max(planned[TARGET_FORWARD], planned[DRAFT_STEP]) <= 1.5, (measured, planned)


def test_the_lasting_parts_are_those_of_the_real_thing(small: Path, tmp_path: Path) -> None:
    overrides = ["drafter.kind=eagle3", "train.ema_decay=0.9", "train.optimizer=muon", f"save.dir={tmp_path}"]
    parts, run = memory_plan(small, *overrides).persistent, prepared(small, *overrides)
    weights = [weight for weight in run.drafter.parameters() if weight.requires_grad]
    trained = 4 * sum(weight.numel() for weight in weights)
    matrices = 4 * sum(w.numel() for w in weights if w.ndim == 2 and run.backbone.vocab not in w.shape)
    assert parts["backbone weights"] >= 4 * sum(weight.numel() for weight in run.backbone.model.parameters())
    assert parts["backbone weights"] < 1.02 * 4 * sum(weight.numel() for weight in run.backbone.model.parameters())
    assert parts["drafter weights"] == parts["weight average"] == trained
    assert parts["optimizer state"] == 2 * trained - matrices


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("kind", methods())
def test_every_drafter_can_be_planned(kind: str, small: Path) -> None:
    for accelerator in (False, True):
        recipe = load_recipe(small, [f"drafter={{kind: {kind}}}"])
        memory = MemoryPlan(recipe, make_fake_models(recipe, accelerator), accelerator, True).step(MicroBatch(2, 32))
        assert memory.phases[DRAFT_STEP]["drafter activations"] > 0 and memory.phases[DRAFT_STEP]["objective"] > 0


def test_recomputed_blocks_are_planned_as_they_are_computed(small: Path) -> None:
    """The backward computes again with fused attention, whose scores it does not keep, as the forward did."""
    options = ["drafter={kind: block, layers: 2, depth: 3}", "train.gradient_checkpointing=true"]
    plans = [memory_plan(small, *options[:count], accelerator=True) for count in (1, 2)]
    kept, again = (plan.step(MicroBatch(1, 32)).phases[DRAFT_STEP] for plan in plans)
    assert again["drafter activations"] < kept["drafter activations"] and again["attention"] < kept["attention"]


@pytest.mark.matrix(cells=1)
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_trained_backbone_adds_its_passes_to_the_arithmetic(kind: str, small: Path) -> None:
    def operations(*changes: str) -> dict[str, int]:
        return step_operations(memory_plan(small, f"drafter.kind={kind}", *changes, accelerator=True), MicroBatch(1, 24))

    frozen, trained, held, again = operations(), *(
        operations(f"backbone.lora={{rank: 1, kl_weight: {weight}}}", *more)
        for weight, more in ((0, ()), (1, ()), (0, ("train.gradient_checkpointing=true",)))
    )  # fmt: skip
    forward, backward = frozen["backbone"], trained["drafters"] - frozen["drafters"]
    assert held["backbone"] == 2 * trained["backbone"] > 2 * forward
    assert backward > 0.8 * forward, "gradients of the inputs take as much as the forward"
    assert again["drafters"] > trained["drafters"] + 0.8 * forward, "a recomputed forward is one more"


@pytest.mark.slow
def test_several_heads_learn_one_after_another(small: Path) -> None:
    alone = [memory_plan(small, f"drafter={{kind: {kind}, depth: 2}}") for kind in ("eagle3", "medusa")]
    both = memory_plan(small, "drafter={}", "heads={eagle3: {kind: eagle3, depth: 2}, medusa: {kind: medusa, depth: 2}}")
    one, two, together = (plan.step(MicroBatch(4, 60)) for plan in (*alone, both))
    for part in ("drafter weights", "optimizer state"):
        assert together.phases[DRAFT_STEP][part] == one.phases[DRAFT_STEP][part] + two.phases[DRAFT_STEP][part]
    activations = [memory.phases[DRAFT_STEP]["drafter activations"] for memory in (one, two, together)]
    assert activations[2] == activations[0] > activations[1]


@pytest.mark.parametrize(("key", "kind"), [("anchor_share", "block"), ("deeper_share", "eagle3")])
def test_a_share_of_the_positions_takes_less_memory(small: Path, key: str, kind: str) -> None:
    taken = {}
    for share in (0.1, 0.4):
        plan = memory_plan(small, f"drafter={{kind: {kind}, depth: 4, {key}: {share}}}", "objective.chunk_size=64")
        taken[share] = plan.step(MicroBatch(4, 250)).phases[DRAFT_STEP]["drafter activations"]
    assert 1.2 < taken[0.4] / taken[0.1] < 4.5


def test_linear_layers_of_few_bits_take_few(small: Path) -> None:
    """int8: a byte a weight and a scale a row; int4: half a byte, and a scale and a shift for each 128 weights. Embeddings stay whole."""
    plans = [memory_plan(small, f"backbone.dtype={dtype}", accelerator=True) for dtype in DTYPES]
    sizes = [plan.persistent["backbone weights"] for plan in plans]
    layers = [module.weight for module in plans[0].models.backbone.layers.modules() if isinstance(module, torch.nn.Linear)]
    count, rows = sum(weight.numel() for weight in layers), sum(map(len, layers))
    size = plans[1].models.backbone.dtype.itemsize
    whole = sizes[0] - count * size
    assert sizes[1] == whole + count + rows * size
    assert sizes[2] == whole + count // 2 + sum(2 * (weight.numel() // 128) for weight in layers) * size
