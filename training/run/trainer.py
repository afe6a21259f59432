"""One head in training: the drafter, what it learns by, its optimiser, and how it has done so far.

A run has one trainer or several. They share what the backbone says of a batch and nothing else: every trainer has an `Accelerator` of its
own (and with it a gradient scaler), and its random numbers are seeded for each forward. So it ends in the weights that it would have
alone, whoever learns beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.methods import build_drafter, construct_drafter
from headstart.training.log.log import Meter, Result
from headstart.training.objective.objective import Sums
from headstart.training.objective.on_policy import StepKey
from headstart.training.recipe.recipe import Recipe
from headstart.training.run.average import Average, in_place_of_weights
from headstart.training.run.checkpoint import pack, unpack_average, unpack_optimizer
from headstart.training.run.optimizer import build_optimizer
from headstart.training.run.schedule import learning_rate
from headstart.training.run.sharding import keep_whole, whole
from headstart.training.run.step import TrainStep


@dataclass
class DrafterTrainer:
    name: str
    """Empty where there is but one."""
    recipe: Recipe
    """Of this head alone."""
    accelerator: Accelerator
    drafter: Drafter
    module: nn.Module
    """A `TrainStep` around the drafter, wrapped for data parallelism and autocast, or sharded."""
    optimizer: Any
    average: Average | None
    """Of the weights, where ``train.ema`` asks for one."""
    meter: Meter = field(default_factory=Meter)
    tau: float | None = None
    """Of the last evaluation."""
    step: int = 0
    """The optimiser step that it learns for."""
    skipped: int = 0
    """Steps not taken, since they were not finite."""
    in_a_row: int = 0
    """Of them, the last ones without a step taken in between."""

    @property
    def folder(self) -> Path:
        return Path(self.recipe.save.dir)

    @property
    def prefix(self) -> str:
        """Of the names of its tensors in the state of a run."""
        return f"{self.name}/" if self.name else ""

    @property
    def sharded(self) -> bool:
        return bool(self.accelerator.is_fsdp2)

    def set_rate(self, step: int, steps: int) -> float:
        """Learn for that step, at its rate by the recipe's schedule."""
        self.step = step
        rate = learning_rate(step, steps, self.recipe.train)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def learn(self, features: Features, scale: Tensor, seed: int, last: bool) -> Sums:
        """Gradients of a micro-batch, added to those of the others; processes synchronise in the ``last`` alone."""
        set_seed(seed)
        autocast = self.accelerator.autocast() if self.sharded else nullcontext()   # else accelerate has wrapped the module in it
        keep_whole(self.module, not last)
        with nullcontext() if last else self.accelerator.no_sync(self.module):
            with autocast:
                sums = self.module(features, StepKey(self.recipe.seed, self.step))
            self.accelerator.backward(sums.loss * scale)
        return Sums(*(part.detach() for part in sums))

    def clip(self) -> float:
        """Shorten the gradient to ``train.max_grad_norm`` at most; its norm before."""
        norm: Tensor = self.accelerator.clip_grad_norm_(self.drafter.parameters(), self.recipe.train.max_grad_norm)
        return whole(norm).item()

    def is_finite(self, result: Result) -> bool:
        """An fp16 gradient may overflow: the scaler skips that step and lowers the scale."""
        scaler = self.accelerator.scaler
        return math.isfinite(result.loss) and (math.isfinite(result.grad_norm) or (scaler is not None and scaler.get_scale() > 1))

    def move(self, step: int) -> None:
        """Take the optimiser step that `learn` has prepared."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(step)
        self.in_a_row = 0

    def skip(self) -> None:
        """Forget the gradients; weights, moments and average stay as they are."""
        self.optimizer.zero_grad()
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1

    @contextmanager
    def shown(self) -> Iterator[Drafter]:
        """The drafter to decode with and to save, with the average's weights where there is one; all processes have to enter.

        A sharded drafter is gathered into an unsharded copy in the first process.
        """
        if self.sharded:
            yield self._gathered()
        else:
            with in_place_of_weights(self.average):
                yield self.drafter

    @torch.no_grad()
    def _gathered(self) -> Drafter:
        tensors = {name: whole(tensor) for name, tensor in self.drafter.tensors().items()}
        averaged = {name: whole(tensor) for name, tensor in (self.average.weights if self.average else {}).items()}
        if not self.accelerator.is_main_process:
            return self.drafter
        copy = build(self.recipe, self.drafter.backbone, fresh=False)
        copy.load_tensors(tensors)
        for name, tensor in averaged.items():
            copy.get_parameter(name).copy_(tensor)
        return copy

    def pack(self) -> dict[str, Tensor]:
        """Its tensors of the state of a run, in the first process; where they are sharded, all have to ask."""
        if not (self.sharded or self.accelerator.is_main_process):
            return {}
        return {self.prefix + name: tensor for name, tensor in pack(self.drafter, self.optimizer, self.average).items()}

    def notes(self) -> dict[str, Any]:
        """The rest of it."""
        scaler = self.accelerator.scaler
        return {
            "tau": self.tau,
            "meter": self.meter.state(),
            "skipped": [self.skipped, self.in_a_row],
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def restore(self, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Go on from a state; the weights are in place already."""
        own = self.own(tensors)
        unpack_optimizer(self.drafter, self.optimizer, own)
        if self.average is not None:
            unpack_average(self.average, own)
        self.tau, self.meter = notes["tau"], Meter(**notes["meter"])
        self.skipped, self.in_a_row = notes["skipped"]
        if self.accelerator.scaler is not None and notes["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(notes["scaler"])

    def own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of a state's tensors those that are its own, under the names they would have alone."""
        return {name.removeprefix(self.prefix): tensor for name, tensor in tensors.items() if name.startswith(self.prefix)}


def build(recipe: Recipe, backbone: Backbone, fresh: bool = True) -> Drafter:
    """The drafter of a recipe of one drafter, in fp32 on the backbone's device: with start values by the recipe's seed if ``fresh``,
    else without weights, which are to be loaded.
    """
    set_seed(recipe.seed)
    arguments = {name: value for name, value in recipe.drafter.items() if name != "kind"}
    make = build_drafter if fresh else construct_drafter
    drafter = make(recipe.drafter["kind"], backbone, arguments).to(device=backbone.device, dtype=torch.float32).train()
    if recipe.train.gradient_checkpointing:
        drafter.recompute()
    return drafter


def build_trainer(name: str, recipe: Recipe, accelerator: Accelerator, drafter: Drafter, teacher: Backbone) -> DrafterTrainer:
    """A trainer whose drafter has the weights it starts from."""
    module, optimizer = accelerator.prepare(TrainStep(teacher, drafter, recipe.objective), build_optimizer(drafter, recipe.train))
    average = None if recipe.train.ema is None else Average(drafter, recipe.train.ema)
    return DrafterTrainer(name, recipe, accelerator, drafter, module, optimizer, average)
