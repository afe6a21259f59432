"""From a recipe to everything a training loop needs, in the order in which mistakes are cheapest to report."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.base import Drafter
from headstart.support.errors import UserError
from headstart.training.data.batch_sampler import BatchSampler
from headstart.training.data.data import Splits, load_data, prompts, require_vocabulary, vocabulary_by_frequency
from headstart.training.features.on_policy import require_on_policy, with_cache
from headstart.training.features.source import FeatureSource, require_packable
from headstart.training.features.stored import open_source
from headstart.training.log.log import Log
from headstart.training.log.trackers import require_trackers
from headstart.training.recipe.recipe import Recipe, to_dict
from headstart.training.run.checkpoint import State, find_state, read_state, require_same_recipe, unpack_drafter
from headstart.training.run.provenance import provenance
from headstart.training.run.sharding import fsdp_plugin, is_sharded, require_known, shard_layers
from headstart.training.run.trainer import DrafterTrainer, build, build_trainer


@dataclass
class Run:
    """A training run: what it is made of, and how far it is."""

    recipe: Recipe
    accelerator: Accelerator
    backbone: Backbone
    trainers: list[DrafterTrainer]
    """The heads that are trained, one or several."""
    feed: BatchSampler
    source: FeatureSource
    prompts: list[Tensor]
    tokenizer: PreTrainedTokenizerBase
    log: Log
    origin: dict[str, Any]
    done: int = 0
    """Optimiser steps taken."""
    tokens: int = 0
    """Tokens read."""

    @property
    def drafter(self) -> Drafter:
        """The only head, or the first."""
        return self.trainers[0].drafter

    @property
    def folder(self) -> Path:
        return Path(self.recipe.save.dir)


def prepare(recipe: Recipe) -> Run:
    """Load, build, restore. Raises UserError for whatever the user can mend."""
    require_trackers(recipe)
    accelerator = _accelerator(recipe)
    state = _state(recipe, accelerator)
    where, several = recipe.backbone, accelerator.num_processes > 1
    backbone = load_backbone(
        where.path, dtype=where.dtype, trust_remote_code=where.trust_remote_code, attention=where.attention, device=accelerator.device,
        place=shard_layers if where.shard and several else None,
    )  # fmt: skip
    require_packable(recipe, backbone)
    recipes = recipe.apart()
    drafters = {name: build(one, backbone, fresh=state is None) for name, one in recipes.items()}
    require_on_policy(recipe, backbone, drafters)
    tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
    splits = _data(recipe, tokenizer, backbone, accelerator)
    window = recipe.data.max_length if recipe.data.packing else None
    feed = BatchSampler(splits.train, recipe.train, recipe.seed, accelerator.process_index, accelerator.num_processes, window, where.shard)
    for drafter in drafters.values():
        if state is None and drafter.vocabulary is not None:
            drafter.use_vocabulary(vocabulary_by_frequency(splits.train, len(drafter.vocabulary), backbone.vocab))
    source, kept = open_source(recipe, list(drafters.values()), tokenizer, splits.train, accelerator)
    source = with_cache(recipe, source)
    trainers = [_trainer(name, one, drafters[name], source, state) for name, one in recipes.items()]
    log = Log(recipe, feed.steps, state.step if state else 0, accelerator.is_main_process)
    held_out = prompts(splits.eval, recipe.eval, backbone.max_positions or sys.maxsize)
    run = Run(recipe, accelerator, backbone, trainers, feed, source, held_out, tokenizer, log, provenance(recipe, tokenizer))
    if state is not None:
        _restore(run, state)
    log.say(_summary(run, splits, kept))
    return run


def _accelerator(recipe: Recipe) -> Accelerator:
    handlers = [
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        InitProcessGroupKwargs(timeout=timedelta(hours=2)),   # the others wait while the first evaluates
    ]
    plugin = fsdp_plugin()
    try:
        accelerator = Accelerator(mixed_precision=recipe.train.precision, kwargs_handlers=handlers, fsdp_plugin=plugin)
    except ValueError as error:
        raise UserError(f"train.precision={recipe.train.precision} does not work here ({error}); use no or bf16") from None
    require_known(accelerator, plugin)
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


def _trainer(name: str, recipe: Recipe, drafter: Drafter, source: FeatureSource, state: State | None) -> DrafterTrainer:
    """With the weights of the state, if there is one. An `Accelerator` knows one model and has one gradient scaler: so one each."""
    if state is not None:
        prefix = f"{name}/" if name else ""
        unpack_drafter(drafter, {key.removeprefix(prefix): tensor for key, tensor in state.tensors.items() if key.startswith(prefix)})
    return build_trainer(name, recipe, _accelerator(recipe), drafter, source.teacher)


def _restore(run: Run, state: State) -> None:
    if (was := state.notes.get("data", run.feed.digest)) != run.feed.digest:
        raise UserError(
            f"{state.folder} was trained on other samples (hash {was}, now {run.feed.digest}), so the rest of the run would read others "
            f"than it should: the rows of {run.recipe.data.train} or the tokenizer have changed; restore them, or choose another save.dir"
        )
    run.done, run.tokens = state.step, state.notes["tokens"]
    for trainer in run.trainers:
        trainer.restore(state.tensors, state.notes["heads"][trainer.name])
    run.log.say(f"resuming from {state.folder}")


def _summary(run: Run, splits: Splits, kept: str | None) -> str:
    recipe, accelerator, backbone, train = run.recipe, run.accelerator, run.backbone, run.recipe.train
    tokens, rows = splits.stats.tokens, run.feed.rows
    full = tokens / (rows * recipe.data.max_length)
    packed = f"; packed into {rows:,} rows of {recipe.data.max_length:,}, {full:.1%} full" if recipe.data.packing else ""
    return "\n".join((
        f"backbone  {recipe.backbone.path}: {type(backbone.model).__name__}, {backbone.num_layers} layers of {backbone.dim}, "
        f"vocabulary {backbone.vocab:,}, {str(backbone.dtype).removeprefix('torch.')}, frozen"
        f"{', its layers shared out over the processes' if is_sharded(backbone) else ''}",
        *(f"drafter   {_described(trainer)}" for trainer in run.trainers),
        f"data      {splits.stats}{packed}; {len(run.prompts)} held-out prompts",
        *([] if kept is None else [f"features  {kept}"]),
        f"training  {run.feed.steps:,} steps of {train.batch_size} {'rows' if packed else 'samples'}, "
        f"about {train.batch_size * tokens / rows:,.0f} tokens; precision {train.precision}, "
        f"{accelerator.num_processes} process{'es' if accelerator.num_processes > 1 else ''} on {accelerator.device.type}"
        f"{', sharded (FSDP2)' if accelerator.is_fsdp2 else ''}",
        f"output    {recipe.save.dir}",
    ))  # fmt: skip


def _described(trainer: DrafterTrainer) -> str:
    drafter = trainer.drafter
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    drafted = "" if drafter.vocabulary is None else f", draft vocabulary {len(drafter.vocabulary):,}"
    kind = trainer.recipe.drafter["kind"]
    named = f"{trainer.name} ({kind})" if trainer.name not in ("", kind) else kind
    return f"{named}: depth {drafter.depth}, {trained:,} trainable parameters{drafted}"
