"""Plan a recipe: memory by part, disk, tokens, time, and the largest batch and length that fit. Loads no weights, except to time steps.

Memory is counted on fake models (training/plan/memory.py), for the longest rows of the data, or rows of ``data.max_length`` if the
data are not available locally. Of a backbone that is not available locally only the configuration is downloaded.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.gguf_file import find_gguf
from headstart.heads.backbone.model_config import read_end_tokens
from headstart.inference.bench.systems import OtherPrograms
from headstart.inference.engine.request import device_memory
from headstart.support.config import MAX_MEMORY_GB
from headstart.support.devices import find_accelerator
from headstart.support.errors import UserError, waiting
from headstart.training.data.data import check_data, load_data, read_images, require_vocabulary
from headstart.training.data.kept import Splits
from headstart.training.data.rows import names_file
from headstart.training.data.samples import NoAnswers
from headstart.training.data.tokenise import MIN_TOKENS
from headstart.training.features.cached import bytes_kept, may_keep
from headstart.training.features.codec import CacheFormat
from headstart.training.features.source import require_packable
from headstart.training.plan.duration import UTILISATION, live_until_cached, step_operations, trial, why_not_loadable
from headstart.training.plan.fake_model import FakeModels, make_fake_models
from headstart.training.plan.memory import ALLOCATOR, CHECKPOINT, DRAFT_STEP, OPTIMIZER, TARGET_FORWARD, MemoryPlan, MicroBatch, StepMemory
from headstart.training.plan.memory import size_of as bytes_of
from headstart.training.recipe.recipe import Recipe
from headstart.training.run.start import advice, choose

MAX_ROWS = 65_536
"""Maximum rows of a micro-batch that are tried."""
JSONL_BYTES_PER_TOKEN = 4.5


@dataclass(frozen=True)
class Machine:
    accelerator: bool
    processes: int
    memory: int
    """Bytes per process."""
    name: str
    here: bool
    """True if this machine is of that kind, so that steps can be timed."""

    @property
    def usable(self) -> int:
        return round(self.memory * (1 - ALLOCATOR if self.accelerator else 1))


def find_machine(gpus: int | None, memory: float | None) -> Machine:
    """Return the hardware: ``gpus`` devices of ``memory`` GB, by default this machine's. Raises UserError if its memory is unknown."""
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus is a whole number of at least 1; got {gpus}")
    if memory is not None and not 0 < memory <= MAX_MEMORY_GB:
        raise UserError(f"--memory is a number of gigabytes above 0 and at most {MAX_MEMORY_GB}; got {memory:g}")
    device = find_accelerator()
    if device is None and gpus is not None and memory is None:
        raise UserError(f"--gpus {gpus}: this machine has no accelerator to read the memory of; give it with --memory GB")
    name, total = "accelerator" if gpus is not None else f"CPU with {os.cpu_count()} cores", device_memory(device or torch.device("cpu"))
    if device is not None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
    total = total if memory is None else round(memory * 1e9)
    return Machine(device is not None or gpus is not None, gpus or 1, total, name, device is not None or gpus is None)


@waiting("counting memory")
def plan(
    recipe: Recipe, machine: Machine, tflops: float | None = None, search: bool = True, models: FakeModels | None = None
) -> dict[str, Any]:
    """Return the plan as JSON, but for what `timed` adds; with ``tflops``, each device's peak, a duration too; without ``search``, the
    largest batch and length only where it does not fit. ``models``: the recipe's, if they are made. Raises UserError.
    """
    if tflops is not None and not 0 < tflops < float("inf"):
        raise UserError(f"--tflops is a number above 0, the peak of one GPU in TFLOP/s; got {tflops:g}")
    if recipe.train.batch_size < machine.processes:
        raise UserError(f"train.batch_size={recipe.train.batch_size} leaves some of {machine.processes} GPUs without a sample; raise it")
    with suppress(NoAnswers):
        check_data(recipe.data)
    models = models or make_fake_models(recipe, machine.accelerator)
    require_packable(recipe, models.backbone)
    splits = read_data(recipe, models)
    samples = splits if isinstance(splits, Splits) else None
    share = -(-recipe.train.batch_size // machine.processes)
    size = micro_batch(recipe, samples, min(recipe.train.micro_batch or share, share))
    memory_plan = MemoryPlan(recipe, models, machine.accelerator, size.rows < share or machine.processes > 1, machine.processes)
    peak = memory_plan.step(size)
    gguf, dtype = find_gguf(recipe.backbone.path), models.backbone.dtype
    tokens, drafters, processes = _tokens(recipe, samples, machine.processes), models.drafters.values(), machine.processes
    report: dict[str, Any] = {
        "gguf": None if gguf is None else {**gguf.provenance, "memory": gguf.memory(dtype), "summary": gguf.described(dtype)},
        "decoding": models.backbone.refusal,
        "machine": {"name": machine.name, "processes": machine.processes, "memory": machine.memory, "usable": machine.usable},
        "micro_batch": {"rows": size.rows, "length": size.length, "label_tokens": size.label_tokens},
        "memory": {
            "phases": peak.phases, "peak": peak.peak, "phase": peak.peak_phase, "largest_part": peak.largest_part,
            "fits": peak.peak <= machine.usable,
        },
        "fits": _fits(memory_plan, peak, size, machine, models.backbone.max_positions) if search or peak.peak > machine.usable else None,
        "disk": disk(memory_plan, samples, machine),
        "tokens": tokens, "chosen": _chosen(recipe, models, tokens),
        "advice": None if samples is None else advice(recipe, drafters, tokens["steps"], tokens["rows"], processes, machine.accelerator),
    }  # fmt: skip
    report["memory"]["advice"] = None if report["memory"]["fits"] else _advice(recipe, peak, report, machine)
    report["data_unavailable"] = splits if isinstance(splits, str) else None
    report["estimate"] = None if tflops is None else _estimate(memory_plan, size, share, report["tokens"]["steps"], tflops)
    return report


def _estimate(memory_plan: MemoryPlan, size: MicroBatch, share: int, steps: int | None, tflops: float) -> dict[str, Any]:
    """Return the operations of a device's share of a step, and the hours that the run takes at ``tflops``; None if steps are unknown."""
    operations = step_operations(memory_plan, size)
    per_step = {name: round(count * share / size.rows) for name, count in operations.items()}
    hours = None if steps is None else sum(per_step.values()) * steps / (tflops * 1e12 * UTILISATION) / 3600
    return {"operations_per_step": per_step, "tflops": tflops, "utilisation": UTILISATION, "steps": steps, "hours": hours}


def read_data(recipe: Recipe, models: FakeModels) -> Splits | str:
    """Load the samples, or return why there are none: not downloaded, or not answered yet. Raises UserError if a file cannot be read."""
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # makes `datasets` use only its cache
    settings, data, context = recipe.backbone, recipe.data, models.backbone.max_positions or sys.maxsize
    if data.max_length > context:
        raise UserError(f"data.max_length={data.max_length} is longer than the backbone's context of {context}; lower it")
    try:
        tokenizer = load_tokenizer(settings.path, trust_remote_code=settings.trust_remote_code)
    except UserError as error:
        return str(error)
    try:
        ends = read_end_tokens(settings.path, trust_remote_code=settings.trust_remote_code)
        images = read_images(recipe, tokenizer)
        splits = load_data(data, tokenizer, context, ends=ends, images=images, progress=sys.stderr.isatty())
    except UserError as error:
        if not isinstance(error, NoAnswers) and all(names_file(one.path) or Path(one.path).expanduser().exists() for one in data.train):
            raise
        return str(error)
    require_vocabulary([*splits.train, *splits.eval], min(models.backbone.vocab, len(models.backbone.embed.weight)))
    return splits


def micro_batch(recipe: Recipe, splits: Splits | None, rows: int) -> MicroBatch:
    """Return the largest micro-batch that can occur: the longest samples, or full packed rows."""
    if splits is None:
        return MicroBatch(rows, recipe.data.max_length)
    if recipe.data.packing:
        return MicroBatch(rows, recipe.data.max_length, splits.stats.label_tokens / splits.stats.tokens)
    longest = sorted(splits.train, key=lambda sample: -len(sample.tokens))[:rows]
    length = len(longest[0].tokens)
    labels = max(int(sample.loss_mask[2:].sum()) for sample in longest)
    return MicroBatch(rows, length, labels / max(length - 2, 1))


def _fits(memory_plan: MemoryPlan, peak: StepMemory, size: MicroBatch, machine: Machine, context: int | None) -> dict[str, Any]:
    """Return the maximum rows per forward at this length and the maximum length at this number of rows; 0 if none fits."""

    @cache
    def peak_of(rows: int, length: int) -> int:
        planned = (rows, length) == (size.rows, size.length)
        phases = (peak if planned else memory_plan.step(MicroBatch(rows, length, size.label_share))).phases
        return max(sum(phases[phase].values()) for phase in (TARGET_FORWARD, DRAFT_STEP))

    at_any_size = (sum(parts.values()) for phase, parts in peak.phases.items() if phase in (OPTIMIZER, CHECKPOINT))
    none = sum(memory_plan.persistent.values()) if max(at_any_size) <= machine.usable else machine.usable + 1
    rows = largest(lambda rows: peak_of(rows, size.length), none, size.rows, machine.usable, MAX_ROWS)
    length = largest(lambda length: peak_of(size.rows, max(length, MIN_TOKENS)), none, size.length, machine.usable, context or 2**20)
    length = length if length >= MIN_TOKENS else 0
    return {"rows": rows, "batch_size": rows * machine.processes, "at_length": size.length, "length": length, "at_rows": size.rows}


def largest(peak_of: Callable[[int], int], at_none: int, start: int, limit: int, cap: int) -> int:
    """Return the largest n up to ``cap`` with ``peak_of(n)`` within the limit, to 3 %; 0 if there is none. The result has been tried.

    ``at_none`` is the value at 0. ``peak_of`` is about linear, so a few secant steps suffice.
    """
    peaks, guess = {0: at_none}, min(start, cap)
    for _ in range(8):
        if at_none > limit:
            break
        peaks[guess] = peak_of(guess)
        fitting = max(n for n in peaks if peaks[n] <= limit)
        beyond = [n for n in peaks if peaks[n] > limit]
        if fitting == cap or (beyond and min(beyond) - fitting <= max(1, fitting // 32)):
            break
        low, high = (fitting, min(beyond)) if beyond else sorted(peaks)[-2:]
        guess = low + (limit - peaks[low]) * (high - low) // max(peaks[high] - peaks[low], 1)
        guess = min(max(guess, fitting + 1), high - 1 if beyond else min(cap, 16 * fitting))
    return max((n for n in peaks if peaks[n] <= limit), default=0)


def disk(memory: MemoryPlan, splits: Splits | None, machine: Machine) -> dict[str, Any]:
    """Return the bytes a run writes; None where they depend on unavailable data."""
    recipe, models = memory.recipe, memory.models
    with models.fake_mode():
        heads = sum(bytes_of(list(drafter.tensors().values())) for drafter in models.drafters.values())
        heads += 0 if models.backbone.adapter is None else bytes_of(list(models.backbone.adapter.parameters.values()))
    optimizer = sum(memory.persistent[part] for part in ("optimizer state", "weight average"))
    kept = recipe.save.keep
    sizes: dict[str, Any] = {"heads": heads, "states": (heads + optimizer) * (kept + 1), "kept": kept}
    if recipe.cache.dir is not None:
        form = CacheFormat.of(models.backbone, models.taps, recipe.cache.dtype)
        sizes["features"] = None if splits is None else sum(form.size(len(sample.tokens)) for sample in splits.train)
    elif splits is not None and not machine.accelerator and machine.processes == 1 and may_keep(recipe):
        sizes["between_epochs"] = bytes_kept(recipe, models.backbone, models.taps, splits.feed(recipe))
    if recipe.regenerate.out is not None:
        part = 1.0 if splits is None or recipe.regenerate.limit is None else min(1.0, recipe.regenerate.limit / splits.stats.rows)
        sizes["answers"] = None if splits is None else round(splits.stats.tokens * JSONL_BYTES_PER_TOKEN * part)
    return sizes


def _tokens(recipe: Recipe, splits: Splits | None, processes: int) -> dict[str, Any]:
    if splits is None:
        return dict.fromkeys(("samples", "tokens", "label_tokens", "rows", "training_tokens")) | {"steps": recipe.train.steps}
    feed, stats = splits.feed(recipe, processes=processes), splits.stats
    training_tokens = round(feed.steps * recipe.train.batch_size * stats.tokens / feed.rows)
    return {
        "samples": stats.samples, "tokens": stats.tokens, "label_tokens": stats.label_tokens, "rows": feed.rows, "steps": feed.steps,
        "training_tokens": training_tokens, "summary": str(stats),
    }  # fmt: skip


def _chosen(recipe: Recipe, models: FakeModels, tokens: dict[str, Any]) -> dict[str, Any]:
    """Return by drafter what training will put in place of ``auto``, and why; no values if the data are not available."""
    if tokens["training_tokens"] is None:
        return {name: {"values": {}, "reason": None} for name in models.drafters}
    size = (tokens["training_tokens"] / tokens["steps"], tokens["steps"])
    return {name: asdict(choose(single, models.drafters[name], *size)) for name, single in recipe.per_drafter().items()}


def timed(recipe: Recipe, report: dict[str, Any], machine: Machine, calibrate: bool) -> dict[str, Any]:
    """Return a planned run's duration and what heads will bring, from steps that are timed on this machine, or why neither is known."""
    steps = report["tokens"]["steps"]
    reason = "not asked for (--no-calibration)" if not calibrate else None
    reason = reason or ("how many steps there are depends on data that are not here" if steps is None else None)
    reason = reason or (None if machine.here else "this machine has no accelerator to time it on")
    reason = reason or (None if report["memory"]["fits"] else "it does not fit")
    time, gains, tried = None, None, live_until_cached(recipe)
    reason = reason or why_not_loadable(tried)
    if reason is None:
        print("timing a few steps of this recipe on this machine (--no-calibration leaves that out)", file=sys.stderr, flush=True)
        try:
            with OtherPrograms() as others:
                seconds, gains = trial(tried, machine.processes, report["tokens"])
            time = {"seconds_per_step": seconds, "hours": seconds * steps / 3600, "without_cache": tried.cache.dir != recipe.cache.dir}
            time["other_programs"] = others.processors
        except UserError as error:
            reason = str(error)
    return {"time": time, "gain": gains, "time_unavailable": reason}


def _advice(recipe: Recipe, peak: StepMemory, report: dict[str, Any], machine: Machine) -> str:
    part, rows, length = peak.largest_part, report["fits"]["rows"], report["fits"]["length"]
    size = report["micro_batch"]
    if part == "backbone weights" and not (rows or length):
        halved, sharded = recipe.backbone.dtype not in ("auto", "fp32") or machine.accelerator, recipe.backbone.shard
        half = "" if halved else "backbone.dtype=bf16, which halves them, or "
        shard = "" if sharded or machine.processes == 1 else "backbone.shard=true, which spreads them over the processes, or "
        return f"take {half}{shard}a smaller backbone or more memory"
    fewer = f"train.micro_batch={rows}" if rows else ""
    shorter = f"data.max_length={length}" if length else ""
    if fewer or shorter:
        now = f"now {size['rows']} rows of {size['length']:,} tokens per forward"
        return f"set {' or '.join(filter(None, (fewer, shorter)))} ({now})"
    if part == "objective":
        chunk = recipe.objective.chunk_size
        return f"lower objective.chunk_size (now {chunk}), or train a smaller draft vocabulary (drafter.draft_vocab_size)"
    if part in ("optimizer state", "drafter weights", "gradients", "optimizer's copy", "copy to save", "weight average"):
        smaller = "train a smaller head (drafter.draft_vocab_size, drafter.intermediate_size)"
        return f"{smaller}, or set train.optimizer=muon or train.ema_decay=null"
    return "take rows of fewer tokens (data.max_length), a smaller backbone, or more memory"
