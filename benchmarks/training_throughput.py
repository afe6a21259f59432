"""Measures the time of each part of a training step: in the first epoch, with live features, and in later ones, which read them from disk;
with depths after the first drafted at all positions, and at a share of them.

    python benchmarks/training_throughput.py [RECIPE] [section.key=value ...] [--share 0.5] [--steps 12] [--threads 1] [--json FILE]

Prints JSON for each way: tokens per second, milliseconds per step spent on features (the backbone's forward pass, or reading them), loss
(the drafter's forward pass, the objective and its gradient), backward and optimizer, and the ratio of whole steps to those of the first
way. Times are medians over the steps; the ways alternate step by step in one process, on the same rows.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from program import options, run

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.base import Drafter
from headstart.heads.methods import build_drafter
from headstart.training.data.batches import Batch, BatchSampler
from headstart.training.data.data import count_labels, load_data, most_frequent
from headstart.training.features.cached import FeaturesBetweenEpochs
from headstart.training.features.source import FeatureSource, LiveFeatures
from headstart.training.objective.loss_rows import StepKey, count_label_tokens
from headstart.training.objective.objective import TrainStep
from headstart.training.recipe.recipe import load_recipe, split_drafter
from headstart.training.run.optimizer import build_optimizer


@dataclass(frozen=True)
class Way:
    """How steps are made, and their times so far."""

    share: float
    source: FeatureSource
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"features": [], "loss": [], "backward": [], "optimizer": []})

    def step(self, number: int, batch: Batch, module: TrainStep, drafter: Drafter, optimizer: torch.optim.Optimizer) -> None:
        """Make one training step as the training loop does, in one micro-batch."""
        drafter.deeper_share = self.share
        with self._clock("features"):
            features = self.source.read(batch)
        with self._clock("loss"):
            sums = module(features, StepKey(0, number))
        with self._clock("backward"):
            (sums.loss / count_label_tokens(batch.loss_mask_BT, batch.document_BT)).backward()
        with self._clock("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[part].append(time.perf_counter() - start)

    def whole(self, warm: int) -> list[float]:
        """The seconds of each step after the first ``warm``."""
        return [sum(times) for times in zip(*self.seconds.values(), strict=True)][warm:]


def measure(args: argparse.Namespace) -> dict[str, object]:
    recipe = load_recipe(args.recipe, args.overrides)
    backbone = load_backbone(recipe.backbone.path, dtype=recipe.backbone.dtype)
    section, arguments = split_drafter(recipe.drafter)
    drafter = build_drafter(section.kind, backbone, arguments).to(backbone.device, torch.float32).train()
    tokenizer = load_tokenizer(recipe.backbone.path, trust_remote_code=recipe.backbone.trust_remote_code)
    samples = load_data(recipe.data, tokenizer, backbone.max_positions or sys.maxsize, progress=False).train
    if drafter.vocabulary is not None:
        drafter.use_vocabulary(most_frequent(count_labels(samples, backbone.vocab), len(drafter.vocabulary)))
    train = recipe.train.model_copy(update={"micro_batch": None, "lr": 1e-4, "optimizer": recipe.train.chosen_optimizer})
    feed, module = BatchSampler(samples, train, recipe.seed), TrainStep(drafter, recipe.objective)
    optimizer = build_optimizer(drafter, train)
    with tempfile.TemporaryDirectory() as folder:
        live = LiveFeatures(backbone, drafter.taps)
        here = recipe.but({"save": {"dir": folder}})
        kept = FeaturesBetweenEpochs(live, here, drafter.vocabulary is not None, store=True)
        named = {"first epoch": live, "later epochs": kept}
        ways = {(name, share): Way(share, source) for name, source in named.items() for share in (1.0, args.share)}
        tokens = []
        for number in range(1, args.steps + args.warm + 1):
            (batch,) = feed.local_batches(number, backbone.device)
            kept.read(batch)
            tokens.append(int((batch.document_BT >= 0).sum()))
            for way in ways.values():
                way.step(number, batch, module, drafter, optimizer)
    first, *_ = (way.whole(args.warm) for way in ways.values())
    found = []
    for (name, share), way in ways.items():
        whole = way.whole(args.warm)
        ratios = [seconds / mine for seconds, mine in zip(first, whole, strict=True)]
        middle = {part: round(1e3 * statistics.median(times[args.warm :]), 1) for part, times in way.seconds.items()}
        rate = sum(tokens[args.warm :]) / sum(whole)
        found.append({"epoch": name, "deeper_share": share, "tokens_a_second": rate, "times_as_fast": statistics.median(ratios)})
        found[-1]["milliseconds"] = middle
    head = {"recipe": args.recipe, "overrides": args.overrides, "threads": args.threads, "steps": args.steps}
    return head | {"device": backbone.device.type, "ways": found}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("recipe", nargs="?", default="recipes/quickstart/eagle3.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--share", type=float, default=0.5, help="share of the positions of depths after the first")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=2, help="steps before the clock counts")
    run(parser, measure)
