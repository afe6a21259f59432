"""From a recipe to everything a training loop needs, in the order in which mistakes are cheapest to report."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list, set_seed
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.base import Drafter, build_drafter
from headstart.heads.errors import UserError
from headstart.training.average import Average
from headstart.training.checkpoint import (
    State,
    find_state,
    read_state,
    require_same_recipe,
    unpack_average,
    unpack_drafter,
    unpack_optimizer,
)
from headstart.training.data import Splits, load_data, prompts, require_vocabulary, vocabulary_by_frequency
from headstart.training.feed import Feed
from headstart.training.log import Log, Meter, require_wandb
from headstart.training.optimizer import build_optimizer
from headstart.training.provenance import provenance
from headstart.training.recipe import Recipe, to_dict
from headstart.training.source import FeatureSource
from headstart.training.step import TrainStep
from headstart.training.stored import open_source

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""Ways of running in which no process has the whole drafter."""


@dataclass
class Run:
    """A training run: what it is made of, and how far it is."""

    recipe: Recipe
    accelerator: Accelerator
    backbone: Backbone
    drafter: Drafter
    module: torch.nn.Module
    """A `TrainStep` around the drafter, wrapped for data parallelism and autocast."""
    optimizer: Any
    feed: Feed
    source: FeatureSource
    prompts: list[Tensor]
    log: Log
    origin: dict[str, Any]
    average: Average | None = None
    """Of the weights, where ``train.ema`` asks for one."""
    meter: Meter = field(default_factory=Meter)
    done: int = 0
    """Optimiser steps taken."""
    tokens: int = 0
    """Tokens read."""
    tau: float | None = None
    """Of the last evaluation."""

    @property
    def folder(self) -> Path:
        return Path(self.recipe.save.dir)


def prepare(recipe: Recipe) -> Run:
    """Load, build, restore. Raises UserError for whatever the user can mend."""
    require_wandb(recipe)
    accelerator = _accelerator(recipe)
    state = _state(recipe, accelerator)
    where = recipe.backbone
    backbone = load_backbone(
        where.path, dtype=where.dtype, trust_remote_code=where.trust_remote_code, attention=where.attention, device=accelerator.device
    )
    drafter = _drafter(recipe, backbone)
    tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
    splits = _data(recipe, tokenizer, backbone, accelerator)
    window = recipe.data.max_length if recipe.data.packing else None
    feed = Feed(splits.train, recipe.train, recipe.seed, accelerator.process_index, accelerator.num_processes, window)
    if state is not None:
        unpack_drafter(drafter, state.tensors)
    elif drafter.vocabulary is not None:
        drafter.use_vocabulary(vocabulary_by_frequency(splits.train, len(drafter.vocabulary), backbone.vocab))
    source, kept = open_source(recipe, drafter, tokenizer, splits.train, accelerator)
    module, optimizer = accelerator.prepare(TrainStep(source.teacher, drafter, recipe.objective), build_optimizer(drafter, recipe.train))
    log = Log(recipe, feed.steps, state.step if state else 0, accelerator.is_main_process)
    held_out = prompts(splits.eval, recipe.eval, backbone.max_positions or sys.maxsize)
    run = Run(recipe, accelerator, backbone, drafter, module, optimizer, feed, source, held_out, log, provenance(recipe, tokenizer))
    if recipe.train.ema is not None:
        run.average = Average(drafter, recipe.train.ema)
    if state is not None:
        _restore(run, state)
    log.say(_summary(run, splits, kept))
    return run


def _accelerator(recipe: Recipe) -> Accelerator:
    handlers = [
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        InitProcessGroupKwargs(timeout=timedelta(hours=2)),   # the others wait while the first evaluates
    ]
    try:
        accelerator = Accelerator(mixed_precision=recipe.train.precision, kwargs_handlers=handlers)
    except ValueError as error:
        raise UserError(f"train.precision={recipe.train.precision} does not work here ({error}); use no or bf16") from None
    if accelerator.distributed_type in SHARDED:
        raise UserError(f"launched as {accelerator.distributed_type.value}; training is data-parallel only: accelerate launch --multi_gpu")
    size, processes = recipe.train.batch_size, accelerator.num_processes
    if size < processes:
        raise UserError(f"train.batch_size={size} leaves some of {processes} processes without a sample; raise it")
    return accelerator


def _state(recipe: Recipe, accelerator: Accelerator) -> State | None:
    """The state to go on from, chosen by the first process for all."""
    found: list[Path | None] = [find_state(Path(recipe.save.dir)) if accelerator.is_main_process else None]
    found = broadcast_object_list(found)
    if found[0] is None:
        return None
    if not recipe.save.resume:
        raise UserError(f"{found[0]} holds an earlier run; set save.resume=true to go on with it, or choose another save.dir")
    state = read_state(found[0])
    require_same_recipe(state, to_dict(recipe))
    return state


def _data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, backbone: Backbone, accelerator: Accelerator) -> Splits:
    with accelerator.main_process_first():   # a named dataset is fetched once, and then read from the cache
        splits = load_data(recipe.data, tokenizer, backbone.max_positions or sys.maxsize, progress=accelerator.is_main_process)
    require_vocabulary(splits, backbone.vocab)
    return splits


def _drafter(recipe: Recipe, backbone: Backbone) -> Drafter:
    """Fresh weights by the recipe's seed, in fp32 on the backbone's device."""
    set_seed(recipe.seed)
    arguments = {name: value for name, value in recipe.drafter.items() if name != "kind"}
    return build_drafter(recipe.drafter["kind"], backbone, arguments).to(device=backbone.device, dtype=torch.float32).train()


def _restore(run: Run, state: State) -> None:
    unpack_optimizer(run.drafter, run.optimizer, state.tensors)
    if run.average is not None:
        unpack_average(run.average, state.tensors)
    if (was := state.notes.get("data", run.feed.digest)) != run.feed.digest:
        raise UserError(
            f"{state.folder} was trained on other samples (hash {was}, now {run.feed.digest}), so the rest of the run would read others "
            f"than it should: the rows of {run.recipe.data.train} or the tokenizer have changed; restore them, or choose another save.dir"
        )
    run.done, run.tokens, run.tau = state.step, state.notes["tokens"], state.notes["tau"]
    run.meter = Meter(**state.notes["meter"])
    if run.accelerator.scaler is not None and state.notes["scaler"] is not None:
        run.accelerator.scaler.load_state_dict(state.notes["scaler"])
    run.log.say(f"resuming from {state.folder}")


def _summary(run: Run, splits: Splits, kept: str | None) -> str:
    recipe, accelerator, backbone, train = run.recipe, run.accelerator, run.backbone, run.recipe.train
    trained = sum(parameter.numel() for parameter in run.drafter.parameters() if parameter.requires_grad)
    drafted = "" if run.drafter.vocabulary is None else f", draft vocabulary {len(run.drafter.vocabulary):,}"
    tokens, rows = splits.stats.tokens, run.feed.rows
    full = tokens / (rows * recipe.data.max_length)
    packed = f"; packed into {rows:,} rows of {recipe.data.max_length:,}, {full:.1%} full" if recipe.data.packing else ""
    return "\n".join((
        f"backbone  {recipe.backbone.path}: {type(backbone.model).__name__}, {backbone.num_layers} layers of {backbone.dim}, "
        f"vocabulary {backbone.vocab:,}, {str(backbone.dtype).removeprefix('torch.')}, frozen",
        f"drafter   {recipe.drafter['kind']}: depth {run.drafter.depth}, {trained:,} trainable parameters{drafted}",
        f"data      {splits.stats}{packed}; {len(run.prompts)} held-out prompts",
        *([] if kept is None else [f"features  {kept}"]),
        f"training  {run.feed.steps:,} steps of {train.batch_size} {'rows' if packed else 'samples'}, "
        f"about {train.batch_size * tokens / rows:,.0f} tokens; precision {train.precision}, "
        f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''} on {accelerator.device.type}",
        f"output    {recipe.save.dir}",
    ))  # fmt: skip
