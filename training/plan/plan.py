"""What a recipe will need: memory by part, disk, tokens, time; and the largest batch and length that fit. Nothing is trained or loaded.

The memory is that of a sketch (training/plan/memory.py), for the longest rows of the data, or rows of ``data.max_length`` where the data
are not here. Of a backbone that is not here its configuration alone is fetched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.support.errors import UserError
from headstart.training.data.batch_sampler import BatchSampler
from headstart.training.data.data import MIN_TOKENS, Splits, load_data, require_vocabulary
from headstart.training.data.rows import ENDINGS, SHIPPED
from headstart.training.features.manifest import format_of, record_size
from headstart.training.features.source import require_packable
from headstart.training.plan.calibrate import live_until_cached, seconds_a_step, why_not
from headstart.training.plan.fake_model import FakeModels, draw
from headstart.training.plan.memory import ALLOCATOR, Memory, Size, Taken
from headstart.training.plan.memory import size_of as bytes_of
from headstart.training.recipe.recipe import Recipe

MOST_ROWS = 65_536
"""Rows a micro-batch that are looked at."""
WRITTEN = 4.5
"""Bytes of JSONL a token of text takes, about."""


@dataclass(frozen=True)
class Place:
    """Where it is to be trained."""

    accelerator: bool
    processes: int
    memory: int
    """Bytes of each process."""
    name: str
    here: bool
    """Whether this machine is of that kind, so that it can be timed."""

    @property
    def usable(self) -> int:
        return round(self.memory * (1 - ALLOCATOR if self.accelerator else 1))


def place(gpus: int | None, memory: float | None) -> Place:
    """``gpus`` devices of ``memory`` GB; without them this machine's. Raises UserError where there is no accelerator to ask."""
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus is a whole number of at least 1; got {gpus}")
    if memory is not None and not 0 < memory < float("inf"):
        raise UserError(f"--memory is a number of gigabytes above 0; got {memory:g}")
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is None and gpus is not None and memory is None:
        raise UserError(f"--gpus {gpus}: this machine has no accelerator whose memory could be asked; say how much with --memory GB")
    name, own = f"CPU with {os.cpu_count()} cores", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if there is not None:
        name = str(there)
        if there.type == "cuda":
            found = torch.cuda.get_device_properties(0)
            name, own = found.name, found.total_memory
    accelerator = there is not None or gpus is not None
    name = "accelerator" if gpus is not None and there is None else name
    return Place(accelerator, gpus or 1, own if memory is None else round(memory * 1e9), name, accelerator == (there is not None))


def plan(recipe: Recipe, gpus: int | None = None, memory: float | None = None, calibrate: bool = True) -> dict[str, Any]:
    """The plan, as JSON holds it. Raises UserError for what training would refuse, as far as that can be seen without loading."""
    if recipe.backbone.lora is not None:
        raise UserError("headstart plan does not count a trainable backbone; with backbone.lora=null it counts the rest")
    where = place(gpus, memory)
    if recipe.train.batch_size < where.processes:
        raise UserError(f"train.batch_size={recipe.train.batch_size} leaves some of {where.processes} GPUs without a sample; raise it")
    sketch = draw(recipe, where.accelerator)
    require_packable(recipe, sketch.backbone)
    splits = read_data(recipe, sketch)
    known = splits if isinstance(splits, Splits) else None
    share = -(-recipe.train.batch_size // where.processes)
    rows = min(recipe.train.micro_batch or share, share)
    size = micro_batch(recipe, known, rows)
    counted = Memory(recipe, sketch, where.accelerator, holds=rows < share or where.processes > 1, processes=where.processes)
    taken = counted.step(size)
    report: dict[str, Any] = {
        "machine": {"name": where.name, "processes": where.processes, "memory": where.memory, "usable": where.usable},
        "micro_batch": {"rows": size.rows, "length": size.length, "learned": size.learned},
        "memory": {
            "phases": taken.phases, "most": taken.most, "phase": taken.phase, "largest": taken.largest,
            "fits": taken.most <= where.usable,
        },
        "fits": _fits(counted, taken, size, where, sketch.backbone.max_positions),
        "disk": disk(recipe, sketch, known),
        "tokens": _tokens(recipe, known, where.processes),
    }  # fmt: skip
    report["advice"] = None if report["memory"]["fits"] else _advice(recipe, taken, report, where)
    report["not_read"] = splits if isinstance(splits, str) else None
    return report | _time(recipe, report, where, calibrate)


def read_data(recipe: Recipe, sketch: FakeModels) -> Splits | str:
    """The samples; or why they are not here: nothing is fetched for a plan. Raises UserError for a file that cannot be read."""
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")   # `datasets`, once it is imported, looks at what it has kept alone
    where, data, context = recipe.backbone, recipe.data, sketch.backbone.max_positions or sys.maxsize
    if data.max_length > context:
        raise UserError(f"data.max_length={data.max_length} is longer than the backbone's context of {context}; lower it")
    try:
        tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
    except UserError as error:
        return str(error)
    try:
        splits = load_data(data, tokenizer, context, progress=sys.stderr.isatty())
    except UserError as error:
        if data.train.startswith(SHIPPED) or data.train.endswith(ENDINGS) or Path(data.train).expanduser().exists():
            raise
        return str(error)
    require_vocabulary(splits, sketch.backbone.vocab)
    return splits


def micro_batch(recipe: Recipe, splits: Splits | None, rows: int) -> Size:
    """The largest that can come: of the longest samples, or packed rows full of them."""
    if splits is None:
        return Size(rows, recipe.data.max_length)
    if recipe.data.packing:
        return Size(rows, recipe.data.max_length, splits.stats.label_tokens / splits.stats.tokens)
    longest = sorted(splits.train, key=lambda sample: -len(sample.tokens))[:rows]
    length = len(longest[0].tokens)
    learned = max(int(sample.loss_mask[2:].sum()) for sample in longest)
    return Size(rows, length, learned / max(length - 2, 1))


def _fits(counted: Memory, taken: Taken, size: Size, where: Place, context: int | None) -> dict[str, Any]:
    """The most rows of that length a process may put through one forward, and the longest of that many rows; 0 where none fits."""
    @cache
    def most(rows: int, length: int) -> int:
        phases = counted.step(Size(rows, length, size.share)).phases
        return max(sum(phases[phase].values()) for phase in ("reading", "learning"))

    at_any_size = (sum(parts.values()) for phase, parts in taken.phases.items() if phase in ("stepping", "saving"))
    none = sum(counted.lasting().values()) if max(at_any_size) <= where.usable else where.usable + 1
    rows = largest(lambda rows: most(rows, size.length), none, size.rows, where.usable, MOST_ROWS)
    length = largest(lambda length: most(size.rows, max(length, MIN_TOKENS)), none, size.length, where.usable, context or 2**20)
    length = length if length >= MIN_TOKENS else 0
    return {"rows": rows, "batch_size": rows * where.processes, "of_length": size.length, "length": length, "of_rows": size.rows}


def largest(most: Callable[[int], int], at_none: int, start: int, limit: int, cap: int) -> int:
    """The largest n to ``cap`` with ``most(n)`` within the limit, to 3 %, and never one that was not looked at; 0 if there is none.

    ``most`` is ``at_none`` for nothing and grows about evenly, so a few secants find it.
    """
    found, guess = {0: at_none}, min(start, cap)
    for _ in range(8):
        if at_none > limit:
            break
        found[guess] = most(guess)
        a = max(n for n in found if found[n] <= limit)
        beyond = [n for n in found if found[n] > limit]
        if a == cap or (beyond and min(beyond) - a <= max(1, a // 32)):
            break
        low, high = (a, min(beyond)) if beyond else sorted(found)[-2:]
        guess = low + (limit - found[low]) * (high - low) // max(found[high] - found[low], 1)
        guess = min(max(guess, a + 1), high - 1 if beyond else min(cap, 16 * a))
    return max((n for n in found if found[n] <= limit), default=0)


def disk(recipe: Recipe, sketch: FakeModels, splits: Splits | None) -> dict[str, Any]:
    """Bytes of what a run writes; None where that depends on data that are not here."""
    with sketch.drawn():
        heads = sum(bytes_of(list(drafter.tensors().values())) for drafter in sketch.drafters.values())
    phases = sum(Memory(recipe, sketch, False, False).lasting()[part] for part in ("optimiser state", "average"))
    kept = recipe.save.keep
    found: dict[str, Any] = {"heads": heads, "states": (heads + phases) * (kept + 1), "kept": kept}
    if recipe.cache.dir is not None:
        form = format_of(recipe.cache, sketch.backbone, sketch.taps)
        found["features"] = None if splits is None else sum(record_size(sample, form) for sample in splits.train)
    if recipe.regenerate.out is not None:
        part = 1.0 if splits is None or recipe.regenerate.limit is None else min(1.0, recipe.regenerate.limit / splits.stats.rows)
        found["answers"] = None if splits is None else round(splits.stats.tokens * WRITTEN * part)
    return found


def _tokens(recipe: Recipe, splits: Splits | None, processes: int) -> dict[str, Any]:
    """What is read; None where that depends on data that are not here."""
    if splits is None:
        return {"samples": None, "tokens": None, "learned": None, "rows": None, "steps": recipe.train.steps, "trained_on": None}
    window = recipe.data.max_length if recipe.data.packing else None
    feed, stats = BatchSampler(splits.train, recipe.train, recipe.seed, 0, processes, window), splits.stats
    read = round(feed.steps * recipe.train.batch_size * stats.tokens / feed.rows)
    return {
        "samples": stats.samples, "tokens": stats.tokens, "learned": stats.label_tokens, "rows": feed.rows, "steps": feed.steps,
        "trained_on": read, "said": str(stats),
    }  # fmt: skip


def _time(recipe: Recipe, report: dict[str, Any], where: Place, calibrate: bool) -> dict[str, Any]:
    """Hours, from real steps on this machine; or why there are none."""
    steps = report["tokens"]["steps"]
    reason = "not asked for (--no-calibration)" if not calibrate else None
    reason = reason or ("how many steps there are depends on data that are not here" if steps is None else None)
    reason = reason or (None if where.here else "this machine has no accelerator to time it on")
    reason = reason or (None if report["memory"]["fits"] else "it does not fit")
    reason = reason or why_not(recipe)
    time, timed = None, live_until_cached(recipe)
    if reason is None:
        try:
            seconds = seconds_a_step(timed, where.processes, steps)
            time = {"seconds_a_step": seconds, "hours": seconds * steps / 3600, "before_cache": timed is not recipe}
        except UserError as error:
            reason = str(error)
    return {"time": time, "no_time": reason}


def _advice(recipe: Recipe, taken: Taken, report: dict[str, Any], where: Place) -> str:
    """What to change, by the part that takes most."""
    part, rows, length = taken.largest, report["fits"]["rows"], report["fits"]["length"]
    size = report["micro_batch"]
    if part == "backbone weights" and not (rows or length):
        half = "backbone.dtype=bf16, which halves them, or " if recipe.backbone.dtype in ("auto", "fp32") and not where.accelerator else ""
        fewer = "backbone.shard=true, which shares them out, or " if where.processes > 1 and not recipe.backbone.shard else ""
        return f"take {half}{fewer}a smaller backbone or more memory"
    fewer = f"train.micro_batch={rows}" if rows else ""
    shorter = f"data.max_length={length}" if length else ""
    if fewer or shorter:
        now = f"now {size['rows']} rows of {size['length']:,} tokens at once"
        return f"set {' or '.join(filter(None, (fewer, shorter)))} ({now})"
    if part == "objective":
        chunk = recipe.objective.chunk_size
        return f"lower objective.chunk_size (now {chunk}), or train a smaller draft vocabulary (drafter.draft_vocab_size)"
    if part in ("optimiser state", "drafter weights", "gradients", "optimiser's copy", "copy to save", "average"):
        smaller = "train a smaller head (drafter.draft_vocab_size, drafter.intermediate_size)"
        return f"{smaller}, or set train.optimizer=muon or train.ema_decay=null"
    return "take rows of fewer tokens (data.max_length), a smaller backbone, or more memory"

