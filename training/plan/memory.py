"""Memory of a training step by part and phase, measured by running the step on `FakeModels`.

There are no formulas for drafters and the objective: their forward and backward run on fake tensors under a `MemoryCounter`. With P
trained weights, Q backbone weights (b bytes each), B rows of T tokens, D width, K depth, M drafting positions (label tokens, or the
share of them that are anchors), V draft vocabulary and C positions of a chunk, the result is about

    backbone weights       Q b                      drafter weights      4 P         weight average (train.ema_decay)   4 P
    optimizer state        8 P (AdamW); 4 P of the matrices under Muon, 8 P of the rest
    gradients              4 P after the backward, before it the readout's; 4 P throughout with accumulation or DDP
    features               (taps + 1) B T D b, and the tokens
    backbone activations   of one layer, since no graph is kept: about B T (4 D + 3 feed-forward width) b
    drafter activations    tensors saved by autograd for K passes, and the gradients of one
    attention              the part of these with a head dimension: queries, keys, values, scores and outputs
    objective              2 K M D and about 6 C V numbers of fp32

Phases: the backbone's forward; a drafter's forward, the objective and the backward; the optimizer (on an accelerator with another copy of
the trained weights, since it updates all at once); on a CPU the checkpoint (a copy of weights and optimizer state for writing).
Drafters of one run train one after another, and the gradients of all are kept until the optimizer step.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from headstart.heads.backbone.features import Anchors, Features
from headstart.heads.backbone.hooks import recompute_within
from headstart.heads.base import Drafter
from headstart.heads.layers.causal_attention import ChunkPolicy, use_chunk_policy
from headstart.support.devices import torch_dtype
from headstart.support.errors import UserError, cause
from headstart.support.pytree import list_tensors
from headstart.training.data.batches import Batch
from headstart.training.features.source import LiveFeatures, opens_head_only
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import SampledAnchors, lm_loss
from headstart.training.objective.objective import objective
from headstart.training.plan.fake_model import FakeModels, MemoryCounter, Parts
from headstart.training.recipe.recipe import Recipe
from headstart.training.run.optimizer import MuonAdamW, build_optimizer
from headstart.training.run.start import autocast_name

TARGET_FORWARD, DRAFT_STEP, OPTIMIZER, CHECKPOINT = "forward (target)", "forward+backward (draft)", "optimizer", "checkpoint"
RUNTIME = {False: 500_000_000, True: 1_000_000_000}
"""Bytes of torch itself, by accelerator or not: libraries on a CPU; context, kernels and workspaces on an accelerator."""
ALLOCATOR = 0.05
"""Share of an accelerator's memory reserved for fragmentation by its allocator."""


@dataclass(frozen=True)
class MicroBatch:
    """Size of one process's micro-batch."""

    rows: int
    length: int
    """Positions per row."""
    label_share: float = 1.0
    """Share of the positions that are label tokens."""

    @property
    def label_tokens(self) -> int:
        return max(1, round(self.label_share * self.rows * max(self.length - 2, 1)))


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step: phase -> part -> bytes."""

    phases: dict[str, Parts]

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> int:
        return sum(self.phases[self.peak_phase].values())

    @property
    def largest_part(self) -> str:
        """The largest part at the peak."""
        parts = self.phases[self.peak_phase]
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True)
class MemoryPlan:
    """Computes the memory of a recipe's steps on one device."""

    recipe: Recipe
    models: FakeModels
    accelerator: bool
    holds_gradients: bool
    """Gradients exist during the backbone's forward: of an earlier micro-batch, or in data parallelism's buckets."""
    processes: int = 1
    """Number of processes, over which ``backbone.shard`` shards the backbone's layers."""

    @cached_property
    def persistent(self) -> Parts:
        """The bytes by part that are allocated throughout training."""
        recipes, drafters = self.recipe.per_drafter(), self.models.drafters
        elsewhere = sum(layer - -(-layer // self.processes) for layer in self._sharded_layers())
        return {
            "torch runtime": RUNTIME[self.accelerator],
            "backbone weights": size_of(self.models.backbone.weights) - elsewhere - self._quantized_away(),
            "drafter weights": sum(size_of([*drafter.parameters(), *drafter.buffers()]) for drafter in drafters.values()),
            "optimizer state": sum(self._optimizer_state(name) for name in drafters),
            "weight average": sum(trained(drafter) for name, drafter in drafters.items() if recipes[name].train.ema_decay is not None),
        }

    def _sharded_layers(self) -> list[int]:
        """Return the bytes of each backbone layer if they are sharded, else nothing."""
        sharded = self.recipe.backbone.shard and self.processes > 1 and not opens_head_only(self.recipe)
        return [size_of(list(layer.parameters())) for layer in self.models.backbone.layers] if sharded else []

    def _quantized_away(self) -> int:
        """Return what linear layers of int8 or int4 take less: quanto keeps a scale a row, or a scale and a shift for each 128 weights."""
        bits, backbone = {"int8": 8, "int4": 4}.get(self.recipe.backbone.dtype), self.models.backbone
        if bits is None or not backbone.whole:
            return 0
        weights = [module.weight for module in backbone.layers.modules() if isinstance(module, torch.nn.Linear)]
        scales = sum(len(weight) if bits == 8 else 2 * weight.numel() // 128 for weight in weights) * backbone.dtype.itemsize
        return size_of(weights) - sum(weight.numel() for weight in weights) * bits // 8 - scales

    def _optimizer_state(self, name: str) -> int:
        """Return the bytes of optimizer state: AdamW has two values per weight, Muon one per matrix entry it updates."""
        with self.models.fake_mode():
            adapter = self.models.backbone.trainable.values()
            train = self.recipe.per_drafter()[name].train
            any_rate = train.model_copy(update={"lr": 1.0, "optimizer": train.chosen_optimizer})
            optimizer = build_optimizer(self.models.drafters[name], any_rate, adapter)
        first, *others = (size_of(group["params"]) for group in optimizer.param_groups)
        return first * (1 if isinstance(optimizer, MuonAdamW) else 2) + 2 * sum(others)

    def step(self, size: MicroBatch) -> StepMemory:
        """Return the memory of a step. Raises UserError for a drafter whose code cannot run on fake tensors."""
        persistent, gradients = self.persistent, sum(trained(drafter) for drafter in self.models.drafters.values())
        target_forward, draft_step = self._run(size)
        gathered = {"gathered layer": 2 * max(self._sharded_layers(), default=0)}
        phases = {
            TARGET_FORWARD: persistent | target_forward | gathered | {"gradients": gradients if self.holds_gradients else 0},
            DRAFT_STEP: persistent | draft_step,
            OPTIMIZER: persistent | {"gradients": gradients} | ({"optimizer's copy": gradients} if self.accelerator else {}),
        }
        if not self.accelerator:
            copied = sum(persistent[part] for part in ("drafter weights", "optimizer state", "weight average"))
            phases[CHECKPOINT] = persistent | {"copy to save": copied}
        return StepMemory({phase: {part: count for part, count in parts.items() if count} for phase, parts in phases.items()})

    def _run(self, size: MicroBatch) -> tuple[Parts, Parts]:
        """Return the non-persistent bytes of the backbone's forward and of the largest drafter step."""
        values, draft_steps = self.models.values, list[Parts]()
        values.label_tokens, values.packed, values.longest = size.label_tokens, self.recipe.data.packing, size.length - 1
        policy = ChunkPolicy("cuda" if self.accelerator else "cpu", ends_only=True)  # fake tensors are always on a CPU
        with _quiet(), self.models.fake_mode(), MemoryCounter() as counter, use_chunk_policy(policy), recompute_within(lambda: values):
            features = self._features(size, counter)
            target_forward = counter.parts([])
            counter.rename(list_tensors(features), "features")
            counter.rows = size.rows
            waiting = 0
            for name, recipe in self.recipe.per_drafter().items():
                drafter = self.models.drafters[name]
                counter.reset_peak()
                draft_step = _draft_step(recipe, FusedLoss(recipe.objective, drafter), features, size, counter)
                kept = waiting + (trained(drafter) if self.holds_gradients else 0)
                draft_steps.append(draft_step | {"gradients": draft_step.get("gradients", 0) + kept})
                waiting += trained(drafter)
        return target_forward, max(draft_steps, key=lambda parts: sum(parts.values()))

    def _features(self, size: MicroBatch, counter: MemoryCounter) -> Features:
        backbone, taps = self.models.backbone, self.models.taps
        counter.part = "features"
        tokens_BT = torch.zeros(size.rows, size.length, dtype=torch.int64)
        members = ((0, 1) if self.recipe.data.packing else (0,),) * size.rows
        batch = Batch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), torch.zeros_like(tokens_BT), members)
        if self.recipe.cache.dir is None and self.recipe.features.endpoint is None:
            counter.part = "backbone activations"
            return LiveFeatures(backbone, taps).read(batch)
        states = {tap: torch.zeros(*tokens_BT.shape, backbone.dim, dtype=backbone.dtype) for tap in taps} or None
        hidden_BTD = torch.zeros(*tokens_BT.shape, backbone.dim, dtype=backbone.dtype)
        norm_BT = torch.zeros(*tokens_BT.shape)
        return Features(tokens_BT, hidden_BTD, states, batch.loss_mask_BT, batch.document_BT, norm_BT, torch.zeros_like(tokens_BT))


def fake_anchors(drafter: Drafter, share: float, label_tokens: int) -> SampledAnchors | None:
    """Return the average number of anchors of a step of this drafter; None if it drafts from all positions."""
    if share == 1:
        return None
    zeros_M = torch.zeros(max(1, round(share * label_tokens)), dtype=torch.int64)
    counts_MK = torch.ones(len(zeros_M), drafter.trained_depth, dtype=torch.bool)
    return SampledAnchors(Anchors(zeros_M, zeros_M), share, zeros_M, zeros_M, zeros_M, counts_MK)


def _draft_step(recipe: Recipe, loss: FusedLoss, features: Features, size: MicroBatch, counter: MemoryCounter) -> Parts:
    """Run one drafter's forward, objective and backward, as in `TrainStep` or `JointStep`; returns the bytes by part at the peak."""
    drafter = loss.drafter
    precision = torch_dtype(autocast_name(recipe.train.precision, drafter.backbone.dtype))
    weights = _trained_weights(drafter)
    try:
        counter.part = "drafter activations"
        with nullcontext() if precision is None else torch.autocast("cpu", precision):
            anchors, deeper = (fake_anchors(drafter, share, size.label_tokens) for share in (drafter.anchor_share, drafter.deeper_share))
            if deeper is None:
                hidden = drafter(features, None if anchors is None else anchors.at)
            else:
                hidden = drafter.forward_deeper(features, deeper.at)
            counter.part = "objective"
            targets, at = replace(features, hidden_BTD=features.hidden_BTD.detach()), None if deeper is None else deeper.at
            total = objective(loss, targets, hidden, anchors, at).loss
        if recipe.backbone.lora is not None:
            original_BTD = features.hidden_BTD.detach().clone() if recipe.backbone.lora.kl_weight else None
            total = total + sum(lm_loss(drafter.backbone, features, recipe.objective.chunk_size, original_BTD))
        del hidden
        counter.part = "drafter activations"
        total.backward()
        return counter.parts([weight.grad for weight in weights if weight.grad is not None])
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        fault = f"the memory of drafter {recipe.drafter['kind']} cannot be found on fake tensors"
        remedy = "train a few steps instead (train.steps=3)"
        raise UserError(f"{fault} ({type(error).__name__}: {cause(error, 200)}); {remedy}") from error
    finally:
        for weight in weights:
            weight.grad = None


def trained(drafter: Drafter) -> int:
    """Return the bytes of a drafter's trained weights, and of the backbone's that are trained with it."""
    return size_of(_trained_weights(drafter))


def _trained_weights(drafter: Drafter) -> list[torch.nn.Parameter]:
    return [*(weight for weight in drafter.parameters() if weight.requires_grad), *drafter.backbone.trainable.values()]


def size_of(tensors: list[Any]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of code that cannot run on fake tensors; the error is reported in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
