"""Measures the time of each part of a training step, with live features and with a feature cache, packed and not packed.

    python benchmarks/training_throughput.py [RECIPE] [section.key=value ...] [--steps 12] [--threads 1] [--json FILE]

Prints JSON for each configuration: tokens per second; milliseconds per step spent on data (selection and collation), features (the
backbone's forward pass, or reading the cache), drafter (forward and backward), objective (readouts of drafts and teacher, divergence and
its gradient) and optimizer; and the time of the whole step relative to one forward pass of the backbone on the same rows, the minimum for
training without a cache. Times are medians over the steps; configurations alternate step by step in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from program import options, run

from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.base import Drafter
from headstart.heads.methods import build_drafter
from headstart.training.data.batch_sampler import BatchSampler
from headstart.training.data.data import count_labels, load_data, most_frequent
from headstart.training.data.kept import Splits
from headstart.training.features.cached import open_source
from headstart.training.features.manifest import Manifest, contents_of, format_of, plan_shards
from headstart.training.features.source import FeatureSource, LiveFeatures
from headstart.training.features.writer import measured_errors, write_missing
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import count_label_tokens
from headstart.training.objective.objective import objective
from headstart.training.recipe.drafter import split_drafter
from headstart.training.recipe.recipe import Recipe, load_recipe
from headstart.training.run.optimizer import build_optimizer

PARTS = ("data", "features", "drafter", "objective", "optimizer")


@dataclass(frozen=True)
class Way:
    """One configuration, and its measurements so far."""

    recipe: Recipe
    feed: BatchSampler
    source: FeatureSource
    seconds: dict[str, list[float]]
    tokens: list[int]
    padding: list[int]


@contextmanager
def clock(into: list[float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    into.append(time.perf_counter() - start)


def take_step(way: Way, step: int, backbone: Backbone, drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
    """Make one training step as the training loop does, in one micro-batch."""
    spent: dict[str, list[float]] = {part: [] for part in (*PARTS, "backbone alone")}
    with clock(spent["data"]):
        (batch,) = way.feed.local_batches(step, backbone.device)
        labels = count_label_tokens(batch.loss_mask_BT, batch.document_BT)
    with clock(spent["features"]):
        features = way.source.read(batch)
    with clock(spent["drafter"]):
        hidden = drafter(features)
    with clock(spent["objective"]):
        sums = objective(FusedLoss(way.recipe.objective, drafter), features, hidden)
    with clock(spent["drafter"]):
        (sums.loss / labels).backward()
    with clock(spent["optimizer"]):
        optimizer.step()
        optimizer.zero_grad()
    with clock(spent["backbone alone"]):
        LiveFeatures(backbone, ()).read(batch)
    for part, times in spent.items():
        way.seconds.setdefault(part, []).append(sum(times))
    way.tokens.append(int((batch.document_BT >= 0).sum()))
    way.padding.append(batch.document_BT.numel() - way.tokens[-1])


def ways(recipe: Recipe, drafter: Drafter, backbone: Backbone, folder: Path) -> Iterator[tuple[str, Way]]:
    """All configurations: packed or not, with live features or with a cache, which is written here."""
    tokenizer = load_tokenizer(recipe.backbone.path, trust_remote_code=recipe.backbone.trust_remote_code)
    for packing in (False, True):
        data = recipe.data.model_copy(update={"packing": packing})
        splits: Splits = load_data(data, tokenizer, backbone.max_positions or sys.maxsize, progress=False)
        train = recipe.train.model_copy(update={"micro_batch": None})
        feed = BatchSampler(splits.train, train, recipe.seed, row_length=data.max_length if packing else None)
        for store in (None, "int8", "bf16"):
            where = str(folder / f"{store}-{packing}") if store else None
            cache = recipe.cache.model_copy(update={"dir": where, "dtype": store or "int8"})
            settings = recipe.model_copy(update={"data": data, "cache": cache})
            if store:
                form = format_of(cache, backbone, drafter.taps)
                contents = contents_of(splits.train, form, backbone, tokenizer, data)
                manifest = Manifest(Path(cache.dir or ""), contents, plan_shards(splits.train, form, cache.shard_mb))
                write_missing(manifest, form, splits, LiveFeatures(backbone, form.taps), progress=False)
                print(f"{store}: {measured_errors(manifest)}", file=sys.stderr)
            source, _ = open_source(settings, [drafter], tokenizer, splits.train)
            yield f"{store or 'live'}{', packed' if packing else ''}", Way(settings, feed, source, {}, [], [])


def report(way: Way, warm: int) -> dict[str, object]:
    middle: Callable[[list[float]], float] = lambda times: 1e3 * statistics.median(times[warm:])  # noqa: E731
    spent = {part: middle(way.seconds[part]) for part in PARTS}
    whole = [sum(way.seconds[part][i] for part in PARTS) for i in range(len(way.tokens))]
    alone = [step / way.seconds["backbone alone"][i] for i, step in enumerate(whole)]
    return {
        "tokens_a_second": sum(way.tokens[warm:]) / sum(whole[warm:]),
        "padding": sum(way.padding[warm:]) / (sum(way.padding[warm:]) + sum(way.tokens[warm:])),
        "rows_an_epoch": way.feed.rows,
        "milliseconds": {part: round(ms, 1) for part, ms in spent.items()},
        "step_over_backbone_forward": statistics.median(alone[warm:]),
    }


def measure(args: argparse.Namespace) -> dict[str, object]:
    recipe = load_recipe(args.recipe, args.overrides)
    backbone = load_backbone(recipe.backbone.path, dtype=recipe.backbone.dtype)
    section, arguments = split_drafter(recipe.drafter)
    drafter = build_drafter(section.kind, backbone, arguments)
    drafter = drafter.to(backbone.device, torch.float32).train()
    with tempfile.TemporaryDirectory() as folder:
        found = dict(ways(recipe, drafter, backbone, Path(folder)))
        if drafter.vocabulary is not None:
            samples = next(iter(found.values())).feed.samples
            drafter.use_vocabulary(most_frequent(count_labels(samples, backbone.vocab), len(drafter.vocabulary)))
        optimizer = build_optimizer(drafter, recipe.train)
        for step in range(1, args.steps + args.warm + 1):
            for way in found.values():
                take_step(way, step, backbone, drafter, optimizer)
        head = {"recipe": args.recipe, "overrides": args.overrides, "threads": args.threads, "steps": args.steps}
        return head | {"device": backbone.device.type, "ways": {name: report(way, args.warm) for name, way in found.items()}}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart/eagle3.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=2, help="steps before the clock counts")
    run(parser, measure)
