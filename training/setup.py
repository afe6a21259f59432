"""Set up a training run from a recipe; cheap checks come first."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin, broadcast_object_list, set_seed
from transformers import PreTrainedTokenizerBase

from headstart.chat.images import ImageReader
from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.model_config import end_tokens
from headstart.heads.base import Drafter
from headstart.heads.checkpoint import require_savable
from headstart.inference.engine.request import context_of
from headstart.support.devices import dtype_name
from headstart.support.errors import UserError
from headstart.training.data.batches import BatchSampler
from headstart.training.data.data import LabelCounts, checked_tokenizer, describe_coverage, load_for, prompts
from headstart.training.data.kept import Splits
from headstart.training.data.samples import Sample
from headstart.training.data.tokenise import begun_at, now, prints_date
from headstart.training.features.cached import keep_between_epochs, open_source
from headstart.training.features.codec import without_prefix
from headstart.training.features.manifest import cached_time
from headstart.training.features.source import FeatureSource, open_for_training, opens_head_only, require_on_policy, require_packable
from headstart.training.recipe.recipe import Recipe, to_dict
from headstart.training.run import checkpoint
from headstart.training.run.checkpoint import State
from headstart.training.run.log import Log, require_trackers
from headstart.training.run.processes import empty_model, fsdp_plugin, in_first_process, is_sharded, require_known, shard_layers
from headstart.training.run.start import Chosen, advice, choose, fit_starts, read_starts, require_starts, set_vocabularies, with_precision
from headstart.training.run.trainer import DrafterTrainer, build, build_trainer


@dataclass
class Run:
    """A training run: its components and progress."""

    recipe: Recipe
    accelerator: Accelerator
    backbone: Backbone
    trainers: list[DrafterTrainer]
    feed: BatchSampler
    source: FeatureSource
    prompts: list[Sample]
    """Held-out prompts for evaluation."""
    held_out: list[Sample]
    """Held-out rows."""
    tokenizer: PreTrainedTokenizerBase
    log: Log
    provenance: dict[str, Any]
    done: int = 0
    """Optimiser steps so far."""
    tokens: int = 0
    """Tokens trained on so far, padding excluded."""
    saved: int = 0
    """Optimiser steps at the last save."""
    pending: bool = False
    """True if the evaluation that is due after these steps has not been made."""
    control: Any = None
    """The processes' group for what they agree on apart from their passes; None: the run's own."""

    @property
    def drafter(self) -> Drafter:
        """The drafter, or the first of several."""
        return self.trainers[0].drafter

    @property
    def folder(self) -> Path:
        return Path(self.recipe.save.dir)


def prepare(recipe: Recipe) -> Run:
    """Load the backbone and data, build the drafters and resume if there is a saved state. Raises UserError."""
    require_trackers(recipe)
    tokenizer, images = checked_tokenizer(recipe)
    recipe = with_precision(recipe)
    accelerator = _accelerator(recipe)
    state = _find_state(recipe, accelerator)
    backbone = _load_backbone(require_starts(recipe) if state is None else recipe, accelerator)
    recipe = _with_time(recipe, tokenizer, state)
    drafters = _build_drafters(recipe, backbone, fresh=state is None and backbone.whole)
    starts = read_starts(recipe, drafters) if state is None else {}
    splits, feed = _load_data(recipe, tokenizer, images, backbone, accelerator)
    source, cache_summary = open_source(recipe, list(drafters.values()), tokenizer, splits.train)
    if state is None and not backbone.whole:
        drafters = _build_drafters(recipe, backbone, fresh=True)  # whose start values are computed from what the source has
    counts = LabelCounts.of(splits, backbone.vocab) if any(drafter.vocabulary is not None for drafter in drafters.values()) else None
    if state is None and counts is not None:
        set_vocabularies(drafters, counts)
    started = [start.apply(drafters[name]) for name, start in starts.items()]
    started += fit_starts([drafters[name] for name in drafters if state is None and name not in starts], splits.train, source, accelerator)
    source, kept = keep_between_epochs(recipe, source, drafters.values(), feed, accelerator.num_processes)
    step_tokens = recipe.train.batch_size * splits.stats.tokens / feed.rows
    trainers = [_trainer(name, one, drafters[name], source, state, (step_tokens, feed.steps)) for name, one in recipe.per_drafter().items()]
    for trainer in trainers:
        trainer.start = starts[trainer.name].provenance if trainer.name in starts else None
        if counts is not None and trainer.drafter.vocabulary is not None:
            trainer.coverage = counts.coverage(trainer.drafter.vocabulary)
    log = Log(recipe, feed.steps, state.step if state else 0, accelerator.is_main_process, state.progress.get("wandb") if state else None)
    eval_prompts = prompts(splits.eval, recipe.eval, context_of(backbone) or sys.maxsize)
    origin = checkpoint.provenance(recipe, tokenizer, end_tokens(backbone.model.generation_config))
    run = Run(recipe, accelerator, backbone, trainers, feed, source, eval_prompts, splits.eval, tokenizer, log, origin)
    if state is not None:
        _resume(run, state)
    log.say(_summary(run, splits, cache_summary or kept, started))
    for trainer in trainers if state is None else []:
        log.note(0, {"init": trainer.start, "draft_vocabulary": trainer.coverage, "chosen": trainer.chosen.values}, trainer.name)
    return run


def _accelerator(recipe: Recipe) -> Accelerator:
    handlers = [
        DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        InitProcessGroupKwargs(timeout=timedelta(hours=2)),  # other processes wait during evaluation
    ]
    plugin = fsdp_plugin()
    try:
        # The recipe alone says how to train: what is not given is read from the environment.
        own = {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=1), "dynamo_backend": "no"}
        accelerator = Accelerator(mixed_precision=recipe.train.precision, kwargs_handlers=handlers, fsdp_plugin=plugin, **own)
    except ValueError as error:
        raise UserError(f"accelerate cannot train here (train.precision={recipe.train.precision}; no works everywhere): {error}") from None
    require_known(accelerator, plugin)
    size, processes = recipe.train.batch_size, accelerator.num_processes
    if size < processes:
        raise UserError(f"train.batch_size={size} leaves some of {processes} processes without a sample; raise it")
    return accelerator


def _find_state(recipe: Recipe, accelerator: Accelerator) -> State | None:
    choice: list[Path | None] = [checkpoint.find_state(Path(recipe.save.dir)) if accelerator.is_main_process else None]
    folder = broadcast_object_list(choice)[0]
    if folder is None:
        return None
    if not recipe.save.resume:
        raise UserError(f"{folder} holds an earlier run; set save.resume=true to go on with it, or choose another save.dir")
    state = checkpoint.read_state(folder)
    checkpoint.require_same_recipe(state, to_dict(recipe))
    return state


def _load_backbone(recipe: Recipe, accelerator: Accelerator) -> Backbone:
    section = recipe.backbone
    sharded = section.shard and accelerator.num_processes > 1 and not opens_head_only(recipe)
    if sharded and not accelerator.is_main_process:  # the main process reads the files, once for all
        backbone = Backbone(shard_layers(empty_model(section), accelerator.device), trees=False)
    else:
        backbone = open_for_training(recipe, accelerator.device, shard_layers if sharded else None)
    require_packable(recipe, backbone)
    if (lora := section.lora) is not None:
        if accelerator.is_fsdp2:
            raise UserError("backbone.lora is trained data-parallel; launch without FSDP (accelerate launch --multi_gpu)")
        set_seed(recipe.seed)
        backbone.add_lora(lora.rank, lora.alpha, lora.dropout, lora.target_modules, lora.use_dora)
    return backbone


def _with_time(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, state: State | None) -> Recipe:
    """Return the recipe with the instant that the run, or its feature cache, has begun with, if the chat template prints dates."""
    if not prints_date(recipe, tokenizer):
        return recipe
    cached = cached_time(Path(recipe.cache.dir)) if recipe.cache.dir is not None else None
    kept = None if state is None else state.progress["recipe"]["data"].get("template_time")
    return begun_at(recipe, [kept, cached], broadcast_object_list([now()])[0])


def _build_drafters(recipe: Recipe, backbone: Backbone, fresh: bool) -> dict[str, Drafter]:
    """Build the drafters by name: initialised if ``fresh``, else without weights, which the saved state has."""
    drafters = {name: build(single, backbone, fresh) for name, single in recipe.per_drafter().items()}
    require_on_policy(recipe, backbone, drafters)
    return drafters


def _load_data(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, images: ImageReader | None, backbone: Backbone, accelerator: Accelerator
) -> tuple[Splits, BatchSampler]:
    ends = end_tokens(backbone.model.generation_config)
    load = partial(load_for, recipe, backbone, tokenizer, images, ends, accelerator.is_main_process)
    splits = in_first_process(accelerator, load)  # the others find what it has downloaded and tokenised
    return splits, splits.feed(recipe, accelerator.process_index, accelerator.num_processes)


def _trainer(
    name: str, recipe: Recipe, drafter: Drafter, source: FeatureSource, state: State | None, length: tuple[float, int]
) -> DrafterTrainer:
    """Build a trainer with an `Accelerator` of its own, and a saved state's weights, if any. ``length``: tokens of a step, and steps."""
    chosen = choose(recipe, drafter, *length)
    if state is not None:
        chosen = Chosen(**state.progress["heads"][name]["chosen"])
        checkpoint.unpack_drafter(drafter, without_prefix(state.tensors, f"{name}/" if name else ""))
    require_savable(drafter)
    trainer = build_trainer(name, chosen.put_into(recipe), _accelerator(recipe), drafter, source)
    trainer.chosen = chosen
    return trainer


def _resume(run: Run, state: State) -> None:
    if (digest := state.progress.get("data", run.feed.samples_hash)) != run.feed.samples_hash:
        fault = f"{state.folder} was trained on other samples (hash {digest}, now {run.feed.samples_hash})"
        changed = f"the rows of {run.recipe.data.name} or the tokenizer have changed; restore them, or choose another save.dir"
        raise UserError(f"{fault}, so the rest of the run would read others than it should: {changed}")
    adapter = state.progress.get("adapter")
    if run.recipe.backbone.adapter is not None and adapter != run.backbone.adapter_digest:
        changed = f"{run.recipe.backbone.adapter} is now {run.backbone.adapter_digest}"
        raise UserError(f"{state.folder} was trained with adapter {adapter}; {changed}: restore it, or choose another save.dir")
    run.done = run.saved = state.step
    run.tokens, run.pending = state.progress["tokens"], bool(run.prompts) and not state.progress.get("evaluated", True)
    for trainer in run.trainers:
        trainer.restore(state.tensors, state.progress["heads"][trainer.name])
    run.log.say(f"resuming from {state.folder}")


def _summary(run: Run, splits: Splits, cache_summary: str | None, started: Sequence[str]) -> str:
    recipe, accelerator, backbone, train = run.recipe, run.accelerator, run.backbone, run.recipe.train
    tokens, rows = splits.stats.tokens, run.feed.rows
    full = tokens / (rows * recipe.data.max_length)
    drafters, processes, gpu = [trainer.drafter for trainer in run.trainers], accelerator.num_processes, accelerator.device.type != "cpu"
    advised = advice(recipe, drafters, run.feed.steps, rows, processes, gpu) if run.done == 0 else None
    packed = f"; packed into {rows:,} rows of {recipe.data.max_length:,}, {full:.1%} full" if recipe.data.packing else ""
    return "\n".join((
        f"backbone  {recipe.backbone.path}: {type(backbone.model).__name__}, {backbone.num_layers} layers of {backbone.dim}, "
        f"vocabulary {backbone.vocab:,}, {dtype_name(backbone.dtype)}, {_trained_part(backbone)}"
        f"{', its layers sharded over the processes' if is_sharded(backbone) else ''}",
        *([f"only      {backbone.refusal}"] if backbone.refusal else []), *(f"drafter   {_described(trainer)}" for trainer in run.trainers),
        *(f"start     {start}" for start in started),
        f"data      {splits}{packed}; {len(run.prompts)} held-out prompts",
        *([] if splits.check is None else [f"answers   {splits.check}"]),
        *([f"warning   {splits.check.warning}"] if splits.check is not None and splits.check.warning else []),
        *([] if splits.mix is None else [f"mix       {splits.mix}"]),
        *([] if cache_summary is None else [f"features  {cache_summary}"]),
        f"training  {run.feed.steps:,} steps of {train.batch_size} {'rows' if packed else 'samples'}, "
        f"about {train.batch_size * tokens / rows:,.0f} tokens; precision {train.precision}, "
        f"{processes} process{'es' if processes > 1 else ''} on {accelerator.device.type}"
        f"{', sharded (FSDP2)' if accelerator.is_fsdp2 else ''}",
        *(f"chosen    {f'{trainer.name}: ' if trainer.name else ''}{trainer.chosen}" for trainer in run.trainers if trainer.chosen.values),
        *([] if advised is None else [f"advice    {advised}"]),
        f"output    {recipe.save.dir}",
    ))  # fmt: skip


def _trained_part(backbone: Backbone) -> str:
    if backbone.adapter is None:
        return "frozen" if backbone.whole else "frozen; its embedding, final norm and output layer alone are loaded"
    size = f"{sum(weight.numel() for weight in backbone.adapter.parameters.values()):,} parameters"
    return f"frozen but for an adapter of {size}" if backbone.trainable else f"frozen, with adapter {backbone.adapter_digest} of {size}"


def _described(trainer: DrafterTrainer) -> str:
    drafter = trainer.drafter
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    vocabulary = "" if trainer.coverage is None else f"; draft vocabulary: {describe_coverage(trainer.coverage)}"
    kind = trainer.recipe.drafter["kind"]
    name = f"{trainer.name} ({kind})" if trainer.name not in ("", kind) else kind
    return f"{name}: depth {drafter.depth}, {trained:,} trainable parameters{vocabulary}"
