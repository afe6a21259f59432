"""A recipe by rule, whose sources training/rules/methods.py names: the values for a model, a method, presets of data and hardware."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from headstart.heads.methods import find_drafter
from headstart.support.config import parse
from headstart.support.errors import UserError, waiting
from headstart.support.text import gigabytes
from headstart.training.plan.compute import estimated_hours, step_operations
from headstart.training.plan.fake_model import make_fake_models
from headstart.training.plan.memory import MemoryPlan, MicroBatch, StepMemory
from headstart.training.plan.plan import Machine, disk
from headstart.training.recipe.drafter import VOCABULARY_KEY
from headstart.training.recipe.recipe import Recipe
from headstart.training.recipe.yaml_text import merged
from headstart.training.rules.datasets import PRESETS, Preset, find_preset
from headstart.training.rules.methods import BATCH_TOKENS, EVERY_METHOD, METHODS, PASSES, Method, find_method, own_values, values_on_cpu
from headstart.training.rules.model import ModelFacts

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

    Activations are recomputed, then the backbone is sharded; on each step fewer rows are tried.

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
    can_recompute = not frozen or find_drafter(tree["drafter"]["kind"]).recomputable  # the backbone can
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


FORWARD_TOKENS = 4096
"""Tokens of a forward pass, enough to keep an accelerator busy."""
BYTES, SHARE_OF_MEMORY = 2, 0.5
"""Of a weight in bf16; of a device's memory that the backbone may take before it is sharded."""
SHARE_OF_ALL = 0.8
"""Of the memory of all devices that it may take before servers run it."""
SERVER = "http://localhost:8000"
"""Where ``headstart serve-features`` serves hidden states by default."""
LEAST_CONTEXT = 32
"""Positions below which a model is no use as a backbone."""


@dataclass(frozen=True)
class Proposal:
    facts: ModelFacts
    method_name: str
    preset: Preset
    machine: Machine
    own: Tree
    """Values for this model, method and hardware; those that all recipes of the method or preset share are left out."""
    assumed: tuple[str, ...] = ()
    figures: Figures | None = None
    """What it takes on the machine; None if it was not planned."""

    @property
    def method(self) -> Method:
        """The rules of the method."""
        return METHODS[self.method_name]

    @property
    def tree(self) -> Tree:
        """The whole recipe."""
        shared = merged(EVERY_METHOD, self.method.shared)
        return ordered(merged(merged(shared, {"data": self.preset.data}), self.own))

    @waiting("fitting rows into memory")
    def fitted(self, config: str | None = None, tflops: float | None = None) -> Proposal:
        """Return the proposal with the changes that make it fit the machine, and with its figures.

        ``config``: where the backbone's configuration is read from, if not its path. Raises UserError if nothing fits.
        """
        place = config or self.facts.path
        changes, figures = fit(self.tree, self.machine, place, tflops=tflops)
        return replace(self, own=ordered(merged(self.own, changes)), figures=figures)


def propose(facts: ModelFacts, method_name: str, machine: Machine, data: str | None = None, extra: Tree | None = None) -> Proposal:
    """Return a recipe's values by rule, without planning it.

    ``data``: a preset, file or dataset (None: by the model). ``extra``: values for this model that no rule knows. Raises UserError for a
    method that is none, or a model with next to no context.
    """
    method = find_method(method_name)
    if facts.context < LEAST_CONTEXT:
        raise UserError(f"{facts.path} has a context of {facts.context} tokens; heads need a backbone of at least {LEAST_CONTEXT}")
    if facts.refusal is not None and _takes_layers(method):
        raise UserError(
            f"--method {method_name} takes the layers of {facts.path}; {facts.refusal}: give another method, as eagle3 or block"
        )
    preset = find_preset(data) if data is not None else PRESETS["ultrachat" if facts.chat else "text"]
    own = merged(_own(facts, method_name, method, preset, machine), extra or {})
    assumed = (*facts.assumed, *_assumed(facts, preset, data), *_assumed_on(machine, method, facts))
    return Proposal(facts, method_name, preset, machine, ordered(own), assumed)


def _takes_layers(method: Method) -> bool:
    """Whether the method is made of the backbone's layers, so that they have to be here."""
    return method.trains_backbone or method.kind == "draft_model"


def _too_large(facts: ModelFacts, machine: Machine) -> bool:
    """Whether the backbone's weights leave the accelerators together too little for anything else, so that servers run it."""
    return machine.accelerator and facts.parameters * BYTES > SHARE_OF_ALL * machine.memory * machine.processes


def _micro_batch(method: Method, batch_size: int, length: int, processes: int) -> int:
    """Return the rows of a forward pass: a power of two, at most a device's share of the step."""
    tokens = FORWARD_TOKENS // 2 if method.trains_backbone else FORWARD_TOKENS  # a trained backbone keeps its activations
    return min(max(1, batch_size // processes), 1 << (max(1, tokens // length).bit_length() - 1))


def fits_one(facts: ModelFacts, memory: float) -> bool:
    """Whether the rules train on one GPU of this many bytes: the backbone takes at most half of it."""
    return facts.parameters * BYTES <= SHARE_OF_MEMORY * memory


def _length_of_run(preset: Preset, batch_size: int) -> Tree:
    if preset.tokens is not None:
        return {"steps": _hundreds(PASSES * preset.tokens / BATCH_TOKENS)}
    return {"epochs": PASSES} if preset.rows is None else {"steps": _hundreds(PASSES * preset.rows / batch_size)}


def _hundreds(steps: float) -> int:
    return max(100, round(steps / 100) * 100)


def _assumed(facts: ModelFacts, preset: Preset, data: str | None) -> list[str]:
    assumed = []
    if data is None:
        what = "it has a chat template" if facts.chat else "it has no chat template"
        assumed.append(f"data: {preset.about}, because {what} (--data names yours)")
    if facts.thinks:
        assumed.append("rows of up to 4,096 tokens, since it is a reasoning model by its chat template")
    return assumed


def _assumed_on(machine: Machine, method: Method, facts: ModelFacts) -> list[str]:
    changed = {} if machine.accelerator else values_on_cpu(method, facts)
    if not changed:
        return []
    values = " and ".join(f"drafter.{key}={value}" for key, value in changed.items())
    bound = "; drafts are accepted in at most the draft vocabulary's share of the answers" if VOCABULARY_KEY in changed else ""
    cost = "tau was 2 % lower after as many tokens, measured once on the embedded model and not on this one"
    return [f"{values}, since it is trained on a CPU: steps are shorter, and {cost}{bound}"]


ORDER = ("backbone", "drafter", "features", "data", "regenerate", "objective", "train", "eval", "save")


def ordered(tree: Tree) -> Tree:
    """Return the sections in the order of docs/recipe.md, and the paths, kinds and lengths first in theirs."""
    return {key: {name: tree[key][name] for name in sorted(tree[key], key=_rank)} for key in sorted(tree, key=ORDER.index)}


def _rank(name: str) -> int:
    first = ("path", "kind", "train", "dir", "steps", "epochs", "batch_size", "micro_batch", "lr")
    return first.index(name) if name in first else len(first)


def _own(facts: ModelFacts, method_name: str, method: Method, preset: Preset, machine: Machine) -> Tree:
    values = own_values(method, facts)
    values["backbone"] = {"path": facts.path}
    if machine.accelerator:
        values["backbone"]["dtype"] = values["train"]["precision"] = "bf16"
    else:
        values["drafter"] |= values_on_cpu(method, facts)
    if preset.tokens is not None and facts.packable:
        values["data"]["packing"] = True
    if facts.refusal is not None or (_too_large(facts, machine) and not _takes_layers(method)):
        values["features"] = {"endpoint": SERVER}
    elif machine.processes > 1 and not method.trains_backbone and not fits_one(facts, machine.memory):
        values["backbone"]["shard"] = True
    values["train"] |= _length_of_run(preset, values["train"]["batch_size"])
    values["train"]["micro_batch"] = _micro_batch(method, values["train"]["batch_size"], values["data"]["max_length"], machine.processes)
    values["regenerate"] = {"temperature": 0.7, "max_new_tokens": values["data"]["max_length"] // 2}
    values["save"] = {"dir": f"out/{facts.name}/{method_name}"}
    return values
