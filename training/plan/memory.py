"""The memory that a training step takes, by part and phase, found by running the step itself on a `FakeModels`.

No formula stands for a drafter's or the objective's code: their own forward and backward run without numbers, and `Live` counts. With P
trained weights, Q of the backbone (b bytes each), B rows of T tokens, D width, K depth, M learned positions, V draft vocabulary and C
positions of a chunk it comes to

    backbone weights       Q b                      drafter weights      4 P         average (train.ema_decay)   4 P
    optimiser state        8 P (AdamW); 4 P of the matrices under Muon, 8 P of the rest
    gradients              4 P once the backward has ended, before that the readout's; 4 P throughout under accumulation or with DDP
    features               (taps + 1) B T D b, and the tokens
    backbone activations   of one layer, since its forward keeps nothing: about B T (4 D + 3 feed-forward width) b
    drafter activations    what autograd keeps of K passes, and the gradients on their way through one
    attention              of that what is laid out by heads: queries, keys, values, scores and what they give
    objective              2 K M D and about 6 C V numbers of fp32

The phases: *reading* (the backbone's forward), *learning* (a drafter's forward, the objective, the backward), *stepping* (the
optimiser, with one more copy of the trained weights on an accelerator, where it works on all at once), and on a CPU *saving* (a copy
of weights and phases on its way to the disk). Several heads learn one after another; the gradients of all wait for the step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headstart.heads.anchors import Anchors
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.layers.chunking import ChunkPolicy, use_chunk_policy
from headstart.support.dtypes import torch_dtype
from headstart.support.errors import UserError
from headstart.support.pytree import list_tensors
from headstart.training.data.packing import Batch
from headstart.training.features.codec import TopKTeacher
from headstart.training.features.source import LiveFeatures, Teacher
from headstart.training.objective.anchors import SampledAnchors
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.objective import objective
from headstart.training.plan.fake_model import FakeModels
from headstart.training.plan.memory_counter import Live, Parts
from headstart.training.recipe.recipe import Recipe
from headstart.training.run.optimizer import MuonAdamW, build_optimizer

RUNTIME = {False: 500_000_000, True: 1_000_000_000}
"""Bytes that torch itself takes: its libraries on a CPU; context, kernels and workspaces on an accelerator."""
ALLOCATOR = 0.05
"""Share of an accelerator's memory that is left free, since its allocator works in blocks."""


@dataclass(frozen=True)
class Size:
    """A micro-batch: what one process puts through one forward."""

    rows: int
    length: int
    """Positions a row."""
    share: float = 1.0
    """How many of the positions are learned."""

    @property
    def learned(self) -> int:
        return max(1, round(self.share * self.rows * max(self.length - 2, 1)))


@dataclass(frozen=True)
class Taken:
    """StepKey -> part -> bytes."""

    phases: dict[str, Parts]

    @property
    def phase(self) -> str:
        """When it is most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def most(self) -> int:
        return sum(self.phases[self.phase].values())

    @property
    def largest(self) -> str:
        """The part that takes most of it."""
        parts = self.phases[self.phase]
        return max(parts, key=lambda part: parts[part])


@dataclass(frozen=True)
class Memory:
    """What a step of a recipe takes on one device."""

    recipe: Recipe
    sketch: FakeModels
    accelerator: bool
    holds: bool
    """Whether there are gradients while the backbone reads: of an earlier micro-batch, or in the buckets of data parallelism."""
    processes: int = 1
    """That share out the backbone's layers where ``backbone.shard`` asks for it."""

    def lasting(self) -> Parts:
        """What is there from the first step to the last."""
        alone = self.recipe.per_drafter()
        drafters, model = self.sketch.drafters, self.sketch.backbone.model
        return {
            "torch itself": RUNTIME[self.accelerator],
            "backbone weights": size_of([*model.parameters(), *model.buffers()]) - self._elsewhere(),
            "drafter weights": sum(size_of([*drafter.parameters(), *drafter.buffers()]) for drafter in drafters.values()),
            "optimiser state": sum(self._moments(name) for name in drafters),
            "average": sum(trained(drafter) for name, drafter in drafters.items() if alone[name].train.ema_decay is not None),
        }

    def _layers(self) -> list[int]:
        """Bytes of each of the backbone's layers, where they are shared out."""
        shared = self.recipe.backbone.shard and self.processes > 1
        return [size_of(list(layer.parameters())) for layer in self.sketch.backbone.layers] if shared else []

    def _elsewhere(self) -> int:
        """Of the backbone's weights, what the other processes keep."""
        return sum(layer - -(-layer // self.processes) for layer in self._layers())

    def _moments(self, name: str) -> int:
        """AdamW keeps two numbers a weight, Muon one; those of the matrices it moves."""
        with self.sketch.drawn():
            optimizer = build_optimizer(self.sketch.drafters[name], self.recipe.per_drafter()[name].train)
        first, *others = (size_of(group["params"]) for group in optimizer.param_groups)
        return first * (1 if isinstance(optimizer, MuonAdamW) else 2) + 2 * sum(others)

    def step(self, size: Size) -> Taken:
        """Raises UserError for a drafter whose code cannot run without numbers."""
        lasting, gradients = self.lasting(), sum(trained(drafter) for drafter in self.sketch.drafters.values())
        reading, learning = self._run(size)
        gathered = {"gathered layer": 2 * max(self._layers(), default=0)}
        phases = {
            "reading": lasting | reading | gathered | {"gradients": gradients if self.holds else 0},
            "learning": lasting | learning,
            "stepping": lasting | {"gradients": gradients} | ({"optimiser's copy": gradients} if self.accelerator else {}),
        }
        if not self.accelerator:
            phases["saving"] = lasting | {"copy to save": sum(lasting[part] for part in ("drafter weights", "optimiser state", "average"))}
        return Taken({phase: {part: count for part, count in parts.items() if count} for phase, parts in phases.items()})

    def _run(self, size: Size) -> tuple[Parts, Parts]:
        """What there is beside the lasting while the backbone reads, and while that drafter learns that takes most."""
        answers, found = self.sketch.answers, list[Parts]()
        answers.learned, answers.yes, answers.longest = size.learned, self.recipe.data.packing, size.length - 1
        policy = ChunkPolicy("cuda" if self.accelerator else "cpu", ends_only=True)   # a fake model is on a CPU, whatever it stands for
        with _quiet(), self.sketch.drawn(), Live() as live, use_chunk_policy(policy):
            features, teacher = self._read(size, live)
            reading = live.parts([])
            live.rename(list_tensors(features), "features")
            live.rows = size.rows
            waiting = 0
            for name, alone in self.recipe.per_drafter().items():
                drafter = self.sketch.drafters[name]
                live.again()
                learning = _learn(alone, drafter, features, fake_anchors(drafter, size), teacher, live)
                own = trained(drafter)
                held = waiting + (own if self.holds else 0)
                found.append(learning | {"gradients": learning.get("gradients", 0) + held})
                waiting += own
        return reading, max(found, key=lambda parts: sum(parts.values()))

    def _read(self, size: Size, live: Live) -> tuple[Features, Teacher]:
        """The features of a batch, live or as they come from a cache, and who teaches."""
        backbone, taps, cache = self.sketch.backbone, self.sketch.taps, self.recipe.cache
        live.part = "features"
        tokens_BT = torch.zeros(size.rows, size.length, dtype=torch.int64)
        members = ((0, 1) if self.recipe.data.packing else (0,),) * size.rows
        batch = Batch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), torch.zeros_like(tokens_BT), members)
        if cache.dir is None:
            live.part = "backbone activations"
            return LiveFeatures(backbone, taps).read(batch), backbone
        states = {tap: torch.zeros(*tokens_BT.shape, backbone.dim, dtype=backbone.dtype) for tap in taps} or None
        if cache.teacher == "hidden":
            hidden_BTD = torch.zeros(*tokens_BT.shape, backbone.dim, dtype=backbone.dtype)
            return Features(tokens_BT, hidden_BTD, states, batch.loss_mask_BT, batch.document_BT), backbone
        likeliest = torch.zeros(*tokens_BT.shape, 2 * min(cache.top_k, backbone.vocab) + 1)
        return Features(tokens_BT, likeliest, states, batch.loss_mask_BT, batch.document_BT), TopKTeacher(torch.ones(backbone.vocab))


def fake_anchors(drafter: Drafter, size: Size) -> SampledAnchors | None:
    """As many anchors as a step of this drafter draws on average; None if it drafts from every position."""
    if drafter.anchor_share == 1:
        return None
    zeros_M = torch.zeros(max(1, round(drafter.anchor_share * size.learned)), dtype=torch.int64)
    counts_MK = torch.ones(len(zeros_M), drafter.trained_depth, dtype=torch.bool)
    return SampledAnchors(Anchors(zeros_M, zeros_M), drafter.anchor_share, zeros_M, zeros_M, zeros_M, counts_MK)


def _learn(recipe: Recipe, drafter: Drafter, features: Features, anchors: SampledAnchors | None, teacher: Teacher, live: Live) -> Parts:
    """One drafter's forward, objective and backward: what training's `TrainStep` is made of."""
    precision = torch_dtype(recipe.train.precision)
    weights = [weight for weight in drafter.parameters() if weight.requires_grad]
    try:
        live.part = "drafter activations"
        with nullcontext() if precision is None else torch.autocast("cpu", precision):
            hidden = drafter(features, None if anchors is None else anchors.at)
            live.part = "objective"
            loss = objective(FusedLoss(recipe.objective, teacher, drafter), features, hidden, anchors).loss
        del hidden
        live.part = "drafter activations"
        loss.backward()
        return live.parts([weight.grad for weight in weights if weight.grad is not None])
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(
            f"what drafter {recipe.drafter['kind']} takes cannot be found without numbers ({type(error).__name__}: {cause}); "
            "train a few steps instead (train.steps=3)"
        ) from error
    finally:
        for weight in weights:
            weight.grad = None


def trained(drafter: Drafter) -> int:
    """Bytes of its trained weights."""
    return size_of([weight for weight in drafter.parameters() if weight.requires_grad])


def size_of(tensors: list[Any]) -> int:
    """Bytes of the storages behind them, each counted once."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch logs of a code that cannot run without numbers is said in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
