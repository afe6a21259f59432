"""Compares all heads on one backbone: at equal training tokens, at equal training seconds, or both, with several seeds.

    python benchmarks/heads.py --out out/heads --speeds
    python benchmarks/heads.py --out out/heads --seeds 0 1 2 [--only medusa eagle3] --tokens 150000 --seconds 60 [a.b=c ...]
    python benchmarks/heads.py --out out/heads --tokens 150000 --seconds 60 --time
    python benchmarks/heads.py --out out/heads --backbone MODEL --train ROWS.jsonl --eval ROWS.jsonl --tokens 150000 data.limit=6000
    python benchmarks/heads.py --out out/heads --table --plot heads.svg

Every entry of heads_entries.py is trained by a recipe of recipes/quickstart (the learning rate, objective and arguments that suit it), all
on the same rows in batches of the same size, and decodes the same held-out prompts at temperatures 0 and 1. There are three stages, so
that what depends on the machine's load is measured apart from what does not; each appends to a file in OUT and skips what is there.

- ``speeds.jsonl``, with ``--speeds`` or before ``--seconds``: training tokens per second in a few steps, on an idle machine.
- ``runs.jsonl``: heads trained for a number of tokens or seconds (which that speed turns into steps), and their acceptance: all prompts
  together, in a chain of 5 drafts (of fewer for heads that draft fewer) and in trees of 24 nodes. OUT/heads keeps the first seed's.
- ``timings.jsonl``, with ``--time``: a few prompts one by one with the kept heads, in a chain, in adaptive trees and without drafts,
  interleaved in one process, on an idle machine.

Prints the means and standard errors over the seeds of all runs in OUT as JSON, or with ``--table`` as Markdown. An entry that fails
is noted, and the others go on. ``a.b=c`` replaces values of all recipes.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import heads_report
import program
from heads_decoding import Acceptance, timed
from heads_entries import ENTRIES, recipe_of
from runs import Results, Row, train_heads
from torch import Tensor

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.training.data.data import load_data, prompts
from headstart.training.evaluation import backbone_losses
from headstart.training.recipe.recipe import Recipe

TRIAL_STEPS, WARM_UP = 12, 4
"""Steps that measure the training speed, and how many of them come before the measured ones."""


class Comparison:
    """The three stages on one backbone."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.failed = args, dict[str, str]()
        args.out.mkdir(parents=True, exist_ok=True)
        self.speeds, self.runs, self.timings = (Results(args.out / f"{name}.jsonl") for name in ("speeds", "runs", "timings"))

    def run(self) -> None:
        """Measure what is missing; one head that fails must not end a comparison of hours."""
        missing = [(results, key, measure) for results, key, measure in self._jobs() if results.find(key) is None]
        for number, (results, key, measure) in enumerate(missing, 1):
            if key["entry"] in self.failed:
                continue
            try:
                row = {**key, **measure(key)}
            except Exception as error:
                traceback.print_exc()
                self.failed[key["entry"]] = f"{type(error).__name__}: {error}"
                continue
            results.add(row)
            print(f"{number} of {len(missing)}: {json.dumps(row)}", file=sys.stderr, flush=True)

    def _jobs(self) -> Iterator[tuple[Results, Row, Callable[[Row], Row]]]:
        """What to measure, seed by seed, so that an interrupted comparison has all entries."""
        args = self.args
        rows = Path(args.train).name if args.train else None
        settings = [rows, args.batch_size, args.prompts, args.new_tokens, *sorted(args.overrides)]
        backbone = Path(args.backbone).name if args.backbone else "embedded"
        entries = [{"backbone": backbone, "settings": settings, "entry": name} for name in args.only]
        if args.speeds or args.seconds is not None:
            yield from ((self.speeds, key, self.training_speed) for key in entries)
        budgets = [{"budget": name, "amount": getattr(args, name)} for name in ("tokens", "seconds") if getattr(args, name) is not None]
        keys = [{**entry, **budget, "seed": seed} for seed in args.seeds for budget in budgets for entry in entries]
        yield from ((self.runs, key, self.trained) for key in keys)
        if args.time:
            yield from ((self.timings, key, self.decoding_speed) for key in keys if key["seed"] == args.seeds[0])

    def training_speed(self, key: Row) -> Row:
        with tempfile.TemporaryDirectory() as folder:
            train_heads(recipe_of(key["entry"], self.args, f"train.steps={TRIAL_STEPS}", f"save.dir={folder}"))
            return {"tokens_per_second": statistics.median(step_speeds(Path(folder))[WARM_UP:])}

    def trained(self, key: Row) -> Row:
        """Train an entry within its budget and measure acceptance."""
        kept = self._folder(key) if key["seed"] == self.args.seeds[0] else None
        with tempfile.TemporaryDirectory(dir=self.args.out) as folder:
            settings = [f"train.steps={self._steps(key)}", f"seed={key['seed']}", f"save.dir={folder}"]
            recipe = recipe_of(key["entry"], self.args, *settings)
            run = train_heads(recipe)
            parameters = sum(weight.numel() for weight in run.trainers[0].trained.values() if weight.requires_grad)
            found = {"parameters": parameters, "steps": run.done, "tokens": run.tokens}
            if recipe.backbone.lora is not None:
                found |= backbone_losses(run.backbone, run.held_out, recipe.objective.chunk_size)
            found |= self._acceptance.measure(Path(folder), recipe)
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("state"))
        return found

    def decoding_speed(self, key: Row) -> Row:
        """Time the heads that were kept."""
        recipe = recipe_of(key["entry"], self.args)
        return timed(self._folder(key), recipe, self._prompts(self.args.timed_prompts), self.args.capture)

    def _steps(self, key: Row) -> int:
        tokens = key["amount"]
        if key["budget"] == "seconds":
            speed = self.speeds.find({name: key[name] for name in ("backbone", "settings", "entry")})
            assert speed is not None
            tokens = key["amount"] * speed["tokens_per_second"]
        return max(1, round(tokens / self._step_tokens))

    def _folder(self, key: Row) -> Path:
        return self.args.out / "heads" / f"{key['backbone']}-{key['entry']}-{zlib.crc32(json.dumps(key).encode()):08x}"

    @cached_property
    def _recipe(self) -> Recipe:
        """Of any entry: they share data and prompts."""
        return recipe_of(self.args.only[0], self.args)

    @cached_property
    def _data(self) -> Any:
        recipe = self._recipe
        return load_data(recipe.data, load_tokenizer(recipe.backbone.path), recipe.data.max_length, progress=False)

    @cached_property
    def _step_tokens(self) -> float:
        stats = self._data.stats
        return self._recipe.train.batch_size * stats.tokens / stats.samples

    @cached_property
    def _acceptance(self) -> Acceptance:
        return Acceptance(self._prompts(self.args.prompts))

    def _prompts(self, count: int) -> list[Tensor]:
        return [one.tokens for one in prompts(self._data.eval, self._recipe.eval, sys.maxsize)[:count]]


def step_speeds(folder: Path) -> list[float]:
    """The tokens per second of every step in a run's log."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]


def main(args: argparse.Namespace) -> Row | str:
    if (args.backbone is None) != (args.train is None) or (args.train is None) != (args.eval is None):
        raise SystemExit("give --backbone, --train and --eval together, or none of them")
    comparison = Comparison(args)
    comparison.run()
    entries = heads_report.summary(comparison.runs.rows, comparison.speeds.rows, comparison.timings.rows)
    if args.plot is not None:
        args.plot.write_text(heads_report.plot(entries))
    return heads_report.table(entries) if args.table else {"failed": comparison.failed, "entries": entries}


def parser() -> argparse.ArgumentParser:
    options = program.options(__doc__)
    options.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where results go, and what has them already")
    options.add_argument("--speeds", action="store_true", help="measure the training speeds; for an idle machine")
    options.add_argument("--tokens", type=int, metavar="N", help="training tokens of a run")
    options.add_argument("--seconds", type=float, metavar="S", help="training seconds of a run")
    options.add_argument("--time", action="store_true", help="decode with the heads kept, for speed; for an idle machine")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--only", nargs="+", choices=list(ENTRIES), default=list(ENTRIES), metavar="NAME", help=", ".join(ENTRIES))
    options.add_argument("--backbone", metavar="MODEL", help="folder or hub id (default: the embedded one, with its own data)")
    options.add_argument("--train", metavar="FILE", help="rows to train on, with --backbone")
    options.add_argument("--eval", metavar="FILE", help="held-out rows whose prompts are decoded, with --backbone")
    options.add_argument("--batch-size", type=int, default=4, help="samples of an optimizer step (4)")
    options.add_argument("--prompts", type=int, default=32, help="prompts to decode at each temperature (32)")
    options.add_argument("--new-tokens", type=int, default=64, help="tokens to generate after each prompt (64)")
    options.add_argument("--timed-prompts", type=int, default=4, help="how many of them --time decodes one by one (4)")
    options.add_argument("--capture", choices=("auto", "off"), default="auto", help="of forward passes with --time; off is slower (auto)")
    options.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a chart of tau")
    options.add_argument("--table", action="store_true", help="print Markdown instead of JSON")
    options.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of all recipes")
    return options


if __name__ == "__main__":
    program.run(parser(), main)
