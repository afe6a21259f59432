"""Trainer of one drafter: the wrapped module, its optimiser, the weight average and statistics.

A run has one or several trainers, which share only the backbone's features of a batch: each has its own `Accelerator` (and so its own
gradient scaler), and random numbers are seeded before every forward. A drafter therefore gets the same weights whether it is trained
alone or with others.

A frozen backbone is not part of the module (`Backbone` is not an `nn.Module`): its features are computed once for all drafters, outside
autocast. A trainable backbone runs inside it, so that data parallelism sees its adapter.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
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
from headstart.support.devices import not_compilable
from headstart.support.errors import UserError
from headstart.training.data.batches import Batch
from headstart.training.features.codec import without_prefix
from headstart.training.features.source import FeatureSource, LiveFeatures
from headstart.training.objective.loss_rows import LmLoss, StepKey, lm_loss
from headstart.training.objective.objective import Sums, TrainStep
from headstart.training.recipe.recipe import Recipe, split_drafter
from headstart.training.recipe.sections import Lora
from headstart.training.recipe.training import Objective
from headstart.training.run.checkpoint import pack, unpack_optimizer
from headstart.training.run.log import Meter, Result
from headstart.training.run.optimizer import Average, adapter_rise, build_optimizer, in_place_of_weights, learning_rate
from headstart.training.run.processes import any_of, full_tensor, is_sharded, keep_gathered, to_local
from headstart.training.run.start import Chosen

RESULTS = ("tau", "acceptance", "teacher_forced")


@dataclass
class DrafterTrainer:
    name: str
    """Name of the drafter; empty if the run has only one."""
    recipe: Recipe
    """Recipe that trains this drafter alone, with the values of ``chosen``."""
    accelerator: Accelerator
    drafter: Drafter
    module: nn.Module
    """The `TrainStep` or `JointStep`, wrapped for data parallelism and autocast, or sharded."""
    optimizer: Any
    average: Average | None = None
    """Moving average of the weights; None without ``train.ema_decay``."""
    meter: Meter = field(default_factory=Meter)
    results: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(RESULTS))
    """Those of the last evaluation, as JSON: ``tau``, the mean acceptance length; ``acceptance``, what drafts were worth, by score and
    depth (`evaluate`); and ``teacher_forced``, the acceptance on stored features, where there was no decoding (`acceptance`)."""
    step: int = 0
    """Current optimiser step, from 1."""
    start: dict[str, Any] | None = None
    """Where the weights started from (``drafter.init``), for the provenance."""
    coverage: dict[str, Any] | None = None
    """The draft vocabulary's `LabelCounts.coverage`; None without draft vocabulary."""
    skipped: int = 0
    """Optimiser steps skipped because the loss or the gradient was not finite."""
    consecutive_skips: int = 0
    """Number of consecutive skipped steps before the current one."""
    chosen: Chosen = field(default_factory=lambda: Chosen({}, ""))
    """What the recipe leaves to ``auto``."""
    rise: float = 1.0
    """`adapter_rise` at the current step; 1 with a frozen backbone."""

    @property
    def folder(self) -> Path:
        return Path(self.recipe.save.dir)

    @property
    def prefix(self) -> str:
        """Prefix of this drafter's tensors in the run's saved state."""
        return f"{self.name}/" if self.name else ""

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """All trained parameters by their names in the saved state: the drafter's and the backbone adapter's."""
        adapter = {f"adapter/{name}": weight for name, weight in self.drafter.backbone.trainable.items()}
        return dict(self.drafter.named_parameters()) | adapter

    @property
    def sharded(self) -> bool:
        return bool(self.accelerator.is_fsdp2)

    def set_learning_rate(self, step: int, steps: int) -> float:
        """Start optimiser step ``step``: set and return the scheduled learning rate."""
        lora = self.recipe.backbone.lora
        self.step, self.rise = step, 1.0 if lora is None else adapter_rise(step, steps, lora)
        rate = learning_rate(step, steps, self.recipe.train)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_ratio", 1.0) * (self.rise if group.get("adapter") else 1.0)
        return rate

    def backward(self, inputs: Features | Batch, scale: Tensor, seed: int, last: bool) -> Sums:
        """Accumulate the gradients of a micro-batch: its features, or itself if the backbone is trained. The ``last`` one synchronises."""
        set_seed(seed)
        autocast = self.accelerator.autocast() if self.sharded else nullcontext()  # unless sharded, the wrapped module applies autocast
        keep_gathered(self.module, not last)
        arguments = (inputs, StepKey(self.recipe.seed, self.step), *((self.rise,) if self.drafter.backbone.trainable else ()))
        with nullcontext() if last else self.accelerator.no_sync(self.module):
            with autocast:
                sums = self.module(*arguments)
            self.accelerator.backward(sums.loss * scale)
        return Sums(*(part.detach() for part in sums))

    def clip_gradients(self) -> float:
        """Clip the gradient to ``train.max_grad_norm``; returns its norm before clipping."""
        norm: Tensor = self.accelerator.clip_grad_norm_(self.trained.values(), self.recipe.train.max_grad_norm)
        return full_tensor(norm).item()

    def is_finite(self, result: Result) -> bool:
        """True if loss and gradient are finite. An fp16 gradient may overflow: the scaler then skips the step and lowers its scale."""
        scaler = self.accelerator.scaler
        return math.isfinite(result.loss) and (math.isfinite(result.grad_norm) or (scaler is not None and scaler.get_scale() > 1))

    def is_weight_finite(self) -> bool:
        """True if all weights are finite. If sharded, all processes must call this."""
        finite = all(bool(torch.isfinite(to_local(weight)).all()) for weight in self.trained.values())
        return not any_of(self.accelerator, not finite) if self.sharded else finite

    def optimizer_step(self) -> None:
        """Update the weights with the accumulated gradients, and the average with the weights."""
        if not self.rise:  # so that the adapter's moments begin with its first update
            for weight in self.drafter.backbone.trainable.values():
                weight.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.step)
        self.consecutive_skips = 0

    def skip_step(self) -> None:
        """Drop the gradients; weights, optimiser state and average are unchanged."""
        self.optimizer.zero_grad()
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.update()
        self.skipped, self.consecutive_skips = self.skipped + 1, self.consecutive_skips + 1

    @contextmanager
    def eval_weights(self) -> Iterator[Drafter]:
        """Yield the drafter for evaluation and saving, with averaged weights if there is an average. All processes must enter.

        A sharded drafter is gathered into an unsharded copy in the main process, or in all processes if the backbone is sharded, since
        all of them then evaluate.
        """
        if self.sharded:
            yield self._gathered()
        else:
            with in_place_of_weights(self.average):
                yield self.drafter

    @torch.no_grad()
    def _gathered(self) -> Drafter:
        tensors = {name: full_tensor(tensor) for name, tensor in self.drafter.tensors().items()}
        averaged = {name: full_tensor(tensor) for name, tensor in (self.average.weights if self.average else {}).items()}
        if not (self.accelerator.is_main_process or is_sharded(self.drafter.backbone)):
            return self.drafter
        copy = build(self.recipe, self.drafter.backbone, fresh=False)
        copy.load_tensors(tensors)
        for name, tensor in averaged.items():
            copy.get_parameter(name).copy_(tensor)
        return copy

    def pack(self) -> dict[str, Tensor]:
        """Return this drafter's tensors for the saved state, in the main process. If sharded, all processes must call this."""
        if not (self.sharded or self.accelerator.is_main_process):
            return {}
        packed = pack(self.drafter, self.optimizer, self.average)
        return {self.prefix + name: tensor for name, tensor in packed.items()}

    def progress(self) -> dict[str, Any]:
        """Return the state other than tensors, as JSON."""
        scaler = self.accelerator.scaler
        return {
            **self.results,
            "start": self.start,
            "chosen": asdict(self.chosen),
            "meter": asdict(self.meter),
            "skipped": [self.skipped, self.consecutive_skips],
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def restore(self, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
        """Restore optimiser, average and statistics from a saved state; weights are loaded before the module is wrapped."""
        tensors = without_prefix(tensors, self.prefix)
        unpack_optimizer(self.trained, self.optimizer, tensors)
        if self.average is not None:
            self.average.load(without_prefix(tensors, "average/"))
        self.results = {key: progress.get(key) for key in RESULTS}
        self.start, self.meter = progress["start"], Meter(**progress["meter"])
        self.skipped, self.consecutive_skips = progress["skipped"]
        if self.accelerator.scaler is not None and progress["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(progress["scaler"])


class JointStep(nn.Module):
    """`TrainStep` with a trained backbone adapter (Medusa-2, 2401.10774 section 2.2.2); takes a batch instead of its features.

    The loss is ``rise`` times the heads' objective, whose gradients reach the adapter through the features, plus ``lm_weight`` times the
    backbone's next-token cross-entropy and ``kl_weight`` times its KL divergence from the original backbone. The heads' teacher is the
    adapted backbone, detached. At a rise of 0 the heads are trained alone.
    """

    def __init__(self, source: FeatureSource, drafter: Drafter, settings: Objective, lora: Lora, compiled: bool = False) -> None:
        super().__init__()
        self.source, self.backbone, self.lora = source, drafter.backbone, lora
        self.original = LiveFeatures(self.backbone, ()) if lora.kl_weight else None
        self.heads = TrainStep(drafter, settings, compiled)
        self.adapter = nn.ParameterList(self.backbone.trainable.values())

    def forward(self, batch: Batch, step_key: StepKey, rise: float) -> Sums:
        features, lm = self._read(batch, rise > 0)
        sums = self.heads(features, step_key)
        if lm is None:  # data parallelism needs the adapter in every graph
            return sums._replace(loss=sums.loss + 0.0 * torch.stack([weight.sum() for weight in self.adapter]).sum())
        kept = self.lora.lm_weight * lm.cross_entropy + self.lora.kl_weight * lm.kl
        return sums._replace(loss=rise * sums.loss + kept, lm_loss=lm.cross_entropy, lm_kl=lm.kl)

    def _read(self, batch: Batch, joint: bool) -> tuple[Features, LmLoss | None]:
        """Run the backbone in its own dtype, as in decoding: with gradients and its own losses if ``joint``."""
        with torch.autocast(batch.tokens_BT.device.type, enabled=False), torch.set_grad_enabled(joint and torch.is_grad_enabled()):
            original_BTD = None
            if joint and self.original is not None:
                with torch.no_grad(), self.backbone.without_adapter():
                    original_BTD = self.original.read(batch).hidden_BTD
            features = self.source.read(batch)
            return features, lm_loss(self.backbone, features, self.heads.settings.chunk_size, original_BTD) if joint else None


def recompute(drafter: Drafter) -> None:
    """Enable gradient checkpointing of the drafter and of a trained backbone, beside which a drafter may do without. Raises UserError."""
    drafter.backbone.recomputing = bool(drafter.backbone.trainable)
    try:
        drafter.recompute()
    except UserError:
        if not drafter.backbone.recomputing:
            raise


def build(recipe: Recipe, backbone: Backbone, fresh: bool = True) -> Drafter:
    """Build a recipe's drafter in fp32 on the backbone's device: initialised with the recipe's seed if ``fresh``, else without weights."""
    set_seed(recipe.seed)
    options, arguments = split_drafter(recipe.drafter)
    make = build_drafter if fresh else construct_drafter
    drafter = make(options.kind, backbone, arguments).to(device=backbone.device, dtype=torch.float32).train()
    for weight in drafter.frozen():
        weight.requires_grad_(False)
    if recipe.train.gradient_checkpointing:
        recompute(drafter)
    return drafter


def build_trainer(name: str, recipe: Recipe, accelerator: Accelerator, drafter: Drafter, source: FeatureSource) -> DrafterTrainer:
    """Build the trainer of a drafter that has its initial or resumed weights."""
    lora, adapter = recipe.backbone.lora, drafter.backbone.trainable
    if recipe.train.compile and (reason := not_compilable(accelerator.device)):
        raise UserError(f"train.compile=true: {reason}, or set train.compile=false")
    step: nn.Module = TrainStep(drafter, recipe.objective, recipe.train.compile)
    if lora is not None:
        step = JointStep(source, drafter, recipe.objective, lora, recipe.train.compile)
    optimizer = build_optimizer(drafter, recipe.train, adapter.values(), 1.0 if lora is None else lora.lr_ratio)
    module, optimizer = accelerator.prepare(step, optimizer)
    trainer = DrafterTrainer(name, recipe, accelerator, drafter, module, optimizer)
    if recipe.train.ema_decay is not None:
        trainer.average = Average(trainer.trained, recipe.train.ema_decay)
    return trainer
