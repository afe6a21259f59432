"""Make a recipe fit its hardware, and find what it takes there: headstart plan's memory, disk and operations.

Where the rules' values do not fit, activations are recomputed, then the backbone is sharded; on each step fewer rows are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headstart.heads.base import Drafter
from headstart.heads.methods import find_drafter
from headstart.support.config import parse
from headstart.support.errors import UserError
from headstart.support.text import gigabytes
from headstart.training.plan.compute import estimated_hours, step_operations
from headstart.training.plan.fake_model import make_fake_models
from headstart.training.plan.memory import MemoryPlan, MicroBatch, StepMemory
from headstart.training.plan.plan import Machine, disk
from headstart.training.recipe.extends import merged
from headstart.training.recipe.recipe import Recipe

Tree = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """What a recipe takes on its machine."""

    peak: int
    """Most bytes of memory at a time, of each device."""
    heads: int
    """Bytes of the heads on disk."""
    states: int
    """Bytes of the states to resume from."""
    hours: float | None
    """Estimated from the arithmetic of the steps; None without a peak in TFLOP/s or a number of steps."""


def fit(tree: Tree, machine: Machine, config: str, *, tflops: float | None = None) -> tuple[Tree, Figures]:
    """Return the changes that make the recipe ``tree`` fit the machine, none if it does, and what it takes then.

    ``config``: the folder or hub id that the backbone's configuration is read from. Raises UserError, naming the largest part, if
    nothing makes it fit.
    """
    closest: StepMemory | None = None
    for change in _ladder(tree, machine):
        plan = _memory_plan(merged(tree, change), machine, config)
        if sum(plan.persistent().values()) > machine.usable:
            closest = closest or StepMemory({"training": plan.persistent()})
            continue
        rows = int(tree["train"]["micro_batch"])
        while rows:
            size = MicroBatch(rows, tree["data"]["max_length"])
            closest = plan.step(size)
            if closest.peak <= machine.usable:
                smaller = {"train": {"micro_batch": rows}} if rows < tree["train"]["micro_batch"] else {}
                return merged(change, smaller), _figures(plan, size, closest, machine, tflops)
            rows //= 2
    assert closest is not None
    part = closest.largest_part
    largest = gigabytes(closest.phases[closest.peak_phase][part])
    more = "more memory (--memory)" if machine.processes > 1 else "more GPUs (--gpus), which share the backbone, or more memory (--memory)"
    raise UserError(
        f"nothing fits {machine.processes} x {gigabytes(machine.memory)}, not even one row at a time: it takes {gigabytes(closest.peak)}, "
        f"of which the largest part is {part}, {largest}; give {more}, or a smaller backbone"
    )


def _ladder(tree: Tree, machine: Machine) -> Iterator[Tree]:
    """Yield changes, the cheapest first."""
    frozen = tree["backbone"].get("lora") is None
    recomputed = {"train": {"gradient_checkpointing": True}}
    can_recompute = not frozen or find_drafter(tree["drafter"]["kind"]).recompute is not Drafter.recompute   # the backbone can
    steps = [{}, recomputed] if can_recompute else [{}]
    yield from steps
    if machine.processes > 1 and frozen and not tree["backbone"].get("shard"):
        yield from (merged({"backbone": {"shard": True}}, change) for change in steps)


def _memory_plan(tree: Tree, machine: Machine, config: str) -> MemoryPlan:
    recipe = parse(Recipe, merged(tree, {"backbone": {"path": config}}))
    return MemoryPlan(recipe, make_fake_models(recipe, machine.accelerator), machine.accelerator, True, machine.processes)


def _figures(plan: MemoryPlan, size: MicroBatch, peak: StepMemory, machine: Machine, tflops: float | None) -> Figures:
    train, hours = plan.recipe.train, None
    if tflops is not None and train.steps is not None:
        micro_batches = -(-train.batch_size // machine.processes) / size.rows
        hours = estimated_hours(step_operations(plan, size), micro_batches, train.steps, tflops)
    on_disk = disk(plan.recipe, plan.models, None)
    return Figures(peak.peak, on_disk["heads"], on_disk["states"], hours)
