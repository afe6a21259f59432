"""A run, written down. Every key a recipe may hold is a field below; anything else is an error.

    recipe = load_recipe("recipes/quickstart/eagle3.yaml", ["train.lr=3e-4", "drafter.depth=3"])

Sections are checked as they are made, so a ``Recipe`` built in Python is held to the same rules as one that was read.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headstart.training.objective.terms import NAMES
from headstart.training.recipe import multi as several
from headstart.training.recipe import strict
from headstart.training.recipe.sections import Backbone, Cache, Data, Regenerate, check
from headstart.training.recipe.strict import RecipeError


@dataclass(frozen=True, kw_only=True)
class Objective:
    terms: dict[str, float] = field(default_factory=lambda: {"kl": 1.0})
    """Term -> weight: kl, reverse_kl, js, ce, tv, lk_alpha, lk, topk_kl, features; docs/recipe.md says what each is for."""
    lk_eta: float = 3.0
    """Of ``lk``: how soon KL gives way to acceptance; 10 suits Medusa."""
    top_k: int = 32
    """Of ``topk_kl``: how many of the backbone's likeliest tokens it tells apart."""
    depth_weights: Literal["expected", "geometric"] = "expected"
    """``expected``: by what each depth adds to the expected length of a draft (D-PACE); ``geometric``: by ``depth_decay``."""
    depth_decay: float = 0.8
    """``geometric``, and of drafts of its own: depth k weighs this to the power k."""
    chunk: int = 1024
    """Positions whose logits are held at a time, at most; less memory when smaller."""
    on_policy: float = 0.0
    """Weight, beside the text, of drafts that go on from the drafter's own proposals, taught by what the backbone says there; 0: none."""
    on_policy_share: float = 0.05
    """Share of the learned positions that such drafts are made from at a step; what they weigh together does not depend on it."""
    on_policy_temperature: float = 1.0
    """Their tokens are drawn from the drafter's own distribution at this temperature; 0 takes the likeliest."""

    def __post_init__(self) -> None:
        for name, weight in self.terms.items():
            check(name in NAMES, "objective.terms", f"knows {', '.join(NAMES)}", name)
            check(0 <= weight < float("inf"), f"objective.terms.{name}", "is a weight, 0 or more", weight)
        check(any(self.terms.values()), "objective.terms", "needs a weight above 0", self.terms)
        check(0 <= self.lk_eta < float("inf"), "objective.lk_eta", "is 0 or more", self.lk_eta)
        check(self.top_k >= 1, "objective.top_k", "is at least 1 token", self.top_k)
        check(0 < self.depth_decay <= 1, "objective.depth_decay", "is above 0 and at most 1", self.depth_decay)
        check(self.chunk >= 1, "objective.chunk", "is at least 1 position", self.chunk)
        check(0 <= self.on_policy < float("inf"), "objective.on_policy", "is a weight, 0 or more", self.on_policy)
        check(0 < self.on_policy_share <= 1, "objective.on_policy_share", "is above 0 and at most 1", self.on_policy_share)
        hot = self.on_policy_temperature
        check(0 <= hot < float("inf"), "objective.on_policy_temperature", "is 0 or more", hot)


@dataclass(frozen=True, kw_only=True)
class Train:
    steps: int | None = None
    """Optimiser steps; governs alone, without ``epochs``."""
    epochs: float | None = None
    """Times through the data; 1 when neither this nor ``steps`` is given."""
    batch_size: int = 8
    """Sequences an optimiser step, over all processes and accumulation."""
    micro_batch: int | None = None
    """Sequences a process puts through one forward; null is its whole share of the batch, without accumulation."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon``: Muon for hidden matrices, AdamW for vocabulary tables and vectors, at one learning rate."""
    lr: float = 1e-3
    """Highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    weight_decay: float = 0.0
    """Of matrices; under ``muon`` of hidden ones alone."""
    max_grad_norm: float = 1.0
    """Largest gradient norm."""
    warmup_ratio: float = 0.03
    """Fraction of the steps over which the learning rate rises."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up; ``wsd`` stays until the ``decay_ratio``, then falls linearly."""
    decay_ratio: float = 0.2
    """Fraction of the steps over which ``wsd`` falls, the last ones."""
    min_lr_ratio: float = 0.1
    """Fraction of ``lr`` at which the schedule ends."""
    ema: float | None = None
    """Evaluate and save a moving average of the weights, which keeps this much of itself at a step (0.999); null: the weights."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast of the drafter's forward; its weights stay in fp32."""
    gradient_checkpointing: bool = False
    """Gradient checkpointing: keep little of each of the drafter's passes and compute it again in backward; less memory, same gradients."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What to do when a loss or its gradient is not finite: ``skip`` does not take that step, and stops after ten in a row."""

    def __post_init__(self) -> None:
        both = f"and train.epochs={self.epochs} are two lengths of one run; set either to null"
        check(None in (self.steps, self.epochs), "train.steps", both, self.steps)
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "epochs", 1.0)
        check(self.steps is None or self.steps >= 1, "train.steps", "is at least 1", self.steps)
        check(self.epochs is None or 0 < self.epochs < float("inf"), "train.epochs", "is above 0", self.epochs)
        check(self.batch_size >= 1, "train.batch_size", "is at least 1", self.batch_size)
        divides = self.micro_batch is None or (self.micro_batch >= 1 and self.batch_size % self.micro_batch == 0)
        check(divides, "train.micro_batch", f"divides train.batch_size={self.batch_size}", self.micro_batch)
        check(0 < self.lr < float("inf"), "train.lr", "is above 0", self.lr)
        check(all(0 <= beta < 1 for beta in self.betas), "train.betas", "are at least 0 and below 1", self.betas)
        check(0 <= self.weight_decay < float("inf"), "train.weight_decay", "is 0 or more", self.weight_decay)
        check(0 < self.max_grad_norm, "train.max_grad_norm", "is above 0 (.inf never clips)", self.max_grad_norm)
        check(
            0 <= self.warmup_ratio < 1,
            "train.warmup_ratio",
            "is the fraction of steps spent warming up, 0 <= warmup_ratio < 1",
            self.warmup_ratio,
        )
        check(0 <= self.min_lr_ratio <= 1, "train.min_lr_ratio", "is a fraction of train.lr, 0 <= min_lr_ratio <= 1", self.min_lr_ratio)
        room = 1 if self.schedule != "wsd" else 1 - self.warmup_ratio
        check(
            0 < self.decay_ratio <= room, "train.decay_ratio", f"is a fraction of the steps, above 0 and at most {room:g}", self.decay_ratio
        )
        check(self.ema is None or 0 < self.ema < 1, "train.ema", "is above 0 and below 1, or null", self.ema)


@dataclass(frozen=True, kw_only=True)
class Eval:
    every: int = 0
    """Steps between evaluations, each of which decodes held-out prompts; 0 evaluates at the end alone."""
    prompts: int = 20
    """How many held-out prompts to decode."""
    prompt_tokens: int = 64
    """Of plain text, the first this many tokens are the prompt; a conversation is asked up to its last answer."""
    max_new_tokens: int = 64
    """Tokens to write after each prompt."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    nodes: int = 24
    """Candidates a backbone pass verifies."""
    width: int = 8
    """Candidates a depth of the tree keeps growing from."""

    def __post_init__(self) -> None:
        check(self.every >= 0, "eval.every", "is 0 or more", self.every)
        for name in ("prompts", "prompt_tokens", "max_new_tokens", "nodes", "width"):
            check(vars(self)[name] >= 1, f"eval.{name}", "is at least 1", vars(self)[name])
        check(0 <= self.temperature < float("inf"), "eval.temperature", "is 0 or more", self.temperature)


@dataclass(frozen=True, kw_only=True)
class Save:
    dir: str
    """Folder of the trained heads, the log and the state to resume from."""
    every: int = 0
    """Steps between checkpoints; 0 saves at the end alone."""
    keep: int = 2
    """Checkpoints to keep on disk."""
    resume: bool = True
    """Go on from the last checkpoint in ``dir``, if there is one."""

    def __post_init__(self) -> None:
        check(self.dir != "", "save.dir", "is the name of a folder", self.dir)
        check(self.every >= 0, "save.every", "is 0 or more", self.every)
        check(self.keep >= 1, "save.keep", "is at least 1", self.keep)


@dataclass(frozen=True, kw_only=True)
class Log:
    wandb: Literal["off", "online", "offline"] = "off"
    """A JSONL log and ``report.html`` are always written; Weights & Biases beside them."""
    tensorboard: bool = False
    """TensorBoard's files too, in ``save.dir/tensorboard``."""
    project: str = "headstart"
    """Project in Weights & Biases."""
    name: str | None = None
    """Name of the run there; null lets it choose."""
    every: int = 10
    """Steps between lines."""

    def __post_init__(self) -> None:
        check(self.every >= 1, "log.every", "is at least 1", self.every)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    backbone: Backbone
    """The frozen model."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """``kind`` names the file in heads/ (or a module of your own); the rest are that drafter's own arguments. This or ``heads``."""
    heads: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Several drafters in its place, trained together on one reading of the backbone, each into ``save.dir/NAME``; see below."""
    data: Data
    """What to learn from."""
    cache: Cache = field(default_factory=Cache)
    """What is kept of the backbone's reading."""
    regenerate: Regenerate = field(default_factory=Regenerate)
    """The backbone's own answers to the data's prompts."""
    objective: Objective = field(default_factory=Objective)
    """What learning lowers."""
    train: Train = field(default_factory=Train)
    """How it is lowered."""
    eval: Eval = field(default_factory=Eval)
    """How accepted tokens per pass are measured."""
    save: Save
    """Where the heads go."""
    log: Log = field(default_factory=Log)
    """Where the numbers go."""
    seed: int = 0
    """Of the drafter's first weights, of the order of the data, and of regenerated answers."""

    def __post_init__(self) -> None:
        check(not (self.drafter and self.heads), "heads", "stand in place of drafter, not beside it; leave one out", list(self.heads))
        if not self.heads:
            if "kind" not in self.drafter:
                raise RecipeError("missing key drafter.kind: the drafter to train, as in drafter.kind=eagle3 (or several, as heads)")
            check(isinstance(self.drafter["kind"], str), "drafter.kind", "is text", self.drafter["kind"])
            live = f"needs the backbone to read the drafts, and cache.dir={self.cache.dir!r} spares it all reading; set either to 0 or null"
            check(not self.objective.on_policy or self.cache.dir is None, "objective.on_policy", live, self.objective.on_policy)
        self.apart()
        alike = not (self.backbone.shard and self.cache.dir is not None and self.cache.mode == "lru")
        check(alike, "backbone.shard", "has all processes read alike, cache.mode=lru what each lacks; set one of them back", True)
        check(self.seed >= 0, "seed", "is 0 or more", self.seed)

    def apart(self) -> dict[str, Recipe]:
        """By name, the recipe of each head as if it were trained alone; with ``drafter`` the whole recipe, under an empty name."""
        return several.apart(self)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a YAML recipe; ``overrides`` are dotted, as in ``train.lr=3e-4``, and replace what it says."""
    tree = strict.read(Path(path))
    try:
        tree["heads"] = several.by_name(tree.get("heads") or {})   # by name, so that heads.NAME.depth=3 finds its place
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    for change in overrides:
        strict.override(tree, change)
    try:
        return strict.build(Recipe, {**tree, "heads": several.by_name(tree["heads"] or {})})
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The whole recipe, defaults written out, as JSON and YAML hold it."""
    return strict.to_dict(recipe)


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe, defaults written out; ``load_recipe`` reads it back to an equal one."""
    return strict.dump(recipe)
