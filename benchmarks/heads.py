"""Compares all heads on one backbone: at equal training tokens, at equal training seconds, or both, with several seeds.

    python benchmarks/heads.py --out out/heads --tokens 150000 --seconds 60 --seeds 0 1 2 [--only medusa eagle3] [a.b=c ...]
    python benchmarks/heads.py --out out/heads --backbone MODEL --train ROWS.jsonl --eval ROWS.jsonl --tokens 150000 data.limit=6000
    python benchmarks/heads.py --out out/heads --table --plot heads.svg

Every entry of `ENTRIES` is trained by a recipe of recipes/quickstart (the learning rate, objective and arguments that suit it), all on the
same rows in batches of the same size, and decodes the same held-out prompts at temperatures 0 and 1: all together, in a chain of 5 drafts
(of fewer for heads that draft fewer) and in trees of 24 nodes, for acceptance; and a few of them one by one, in a chain, in adaptive trees
and without drafts, interleaved in one process, for speed. At equal seconds, the number of steps follows
from the training speed of a trial of a few steps, so that the learning rate schedule ends in time.

A finished run is a line of ``OUT/runs.jsonl``; runs found there are skipped. Prints the means and standard errors over the seeds of all
runs in that file as JSON, or with ``--table`` as Markdown. An entry that fails is noted, and the others go on. Without ``--tokens`` and
``--seconds`` nothing is trained. ``a.b=c`` replaces values of all recipes.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import heads_report
import program
from torch import Tensor

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.base import Drafter
from headstart.inference.bench.bench import Race
from headstart.inference.bench.prompts import Prompt
from headstart.inference.bench.systems import AR, HeadstartSystem
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.measure import Settings
from headstart.training.data.data import load_data
from headstart.training.loop import train
from headstart.training.recipe.recipe import Recipe, load_recipe
from headstart.training.setup import Run, prepare

RECIPES = Path(__file__).parent.parent / "recipes" / "quickstart"
CHAIN = 5
"""Drafts of a chain."""
TRIAL_STEPS, WARM_UP = 14, 4
"""Steps that measure the training speed, and how many of them come before the measured ones."""
TEMPERATURES = (0.0, 1.0)
TREE = TreeShape(24, 8)
"""The fixed tree."""
DEEP = f"drafter.depth={CHAIN}"


@dataclass(frozen=True)
class Entry:
    """A kind of head with some of its arguments."""

    kind: str
    changes: tuple[str, ...] = ()
    recipe: str | None = None
    """File in recipes/quickstart, if not that of the kind."""


ENTRIES = {
    "medusa": Entry("medusa", (DEEP,)),
    "medusa-2": Entry("medusa", (DEEP,), "medusa2"),
    "hydra": Entry("hydra", (DEEP, "drafter.layers=1", "drafter.prefix_attention=false")),
    "hydra++": Entry("hydra", (DEEP,)),
    "mlp": Entry("mlp", (DEEP,)),
    "eagle": Entry("eagle", (f"drafter.draft_depth={CHAIN}",)),
    "eagle3": Entry("eagle3", (DEEP,)),
    "eagle3-2-layers": Entry("eagle3", (DEEP, "drafter.layers=2")),
    "eagle3.1": Entry("eagle3", (DEEP, "drafter.fc_norm=true", "drafter.norm_output=true")),
    "block": Entry("block", ("drafter.correction=none",)),
    "block-markov": Entry("block", ("drafter.correction=markov",)),
    "block-recurrent": Entry("block", ("drafter.correction=recurrent",)),
    "mtp": Entry("mtp", (DEEP, "drafter.shared=false")),
    "mtp-shared": Entry("mtp", (DEEP, "drafter.shared=true")),
    "draft-model": Entry("draft_model", (f"drafter.draft_depth={CHAIN}",)),
    "draft-model-parallel": Entry("draft_model", (DEEP, "drafter.parallel=true")),
}


def recipe_of(entry: Entry, args: argparse.Namespace, *more: str) -> Recipe:
    """The entry's recipe, with the data and sizes that all entries share."""
    shared = [f"train.batch_size={args.batch_size}", "eval.every=0", "save.every=0", "log.every=1"]
    shared += [f"eval.prompts={args.prompts}", f"eval.max_new_tokens={args.new_tokens}"]
    if args.backbone is not None:
        shared += [f"backbone.path={args.backbone}", f"data.train={args.train}", f"data.eval={args.eval}"]
    return load_recipe(RECIPES / f"{entry.recipe or entry.kind}.yaml", [*entry.changes, *shared, *args.overrides, *more])


def tokens_per_step(args: argparse.Namespace) -> float:
    recipe = recipe_of(ENTRIES["medusa"], args)
    splits = load_data(recipe.data, load_tokenizer(recipe.backbone.path), recipe.data.max_length, progress=False)
    return recipe.train.batch_size * splits.stats.tokens / splits.stats.samples


def training_speeds(folder: Path) -> list[tuple[int, float]]:
    """The tokens and the tokens per second of every step in a run's log."""
    lines = [line for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines()) if "tokens_per_second" in line]
    before = [0, *(line["tokens"] for line in lines)]
    return [(line["tokens"] - start, line["tokens_per_second"]) for start, line in zip(before, lines, strict=False)]


def train_heads(recipe: Recipe) -> Run:
    """Train without evaluating; the heads are in ``recipe.save.dir``."""
    run = prepare(recipe)
    held_out, run.prompts = run.prompts, []
    try:
        if train(run):
            sys.exit(1)   # stopped by a signal
    finally:
        run.log.close()
    run.prompts = held_out
    return run


def steps_in(seconds: float, entry: Entry, args: argparse.Namespace, step_tokens: float) -> int:
    """The number of steps that take that many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        train_heads(recipe_of(entry, args, f"train.steps={TRIAL_STEPS}", f"save.dir={folder}"))
        speed = statistics.median(speed for _, speed in training_speeds(Path(folder))[WARM_UP:])
    return max(1, round(seconds * speed / step_tokens))


def decode(folder: Path, recipe: Recipe, prompts: list[Tensor], args: argparse.Namespace) -> dict[str, Any]:
    """Decode all prompts together for acceptance, in a chain and in fixed trees, and some one by one for speed."""
    heads = load(folder, load_backbone(recipe.backbone.path, dtype=recipe.backbone.dtype), capture=args.capture)
    drafter, asked = heads.drafter, [Prompt(prompt_T) for prompt_T in prompts]
    assert isinstance(drafter, Drafter)
    depth = min(CHAIN, drafter.max_depth or CHAIN)
    shape, together = TreeShape(1 + depth, 1, depth), SpeculativeModel(heads.backbone, drafter, capture="off")
    plain = HeadstartSystem(AR, SpeculativeModel(heads.backbone, capture=args.capture))
    chain = HeadstartSystem("chain", SpeculativeModel(heads.backbone, drafter, capture=args.capture), (shape, shape))
    found: dict[str, Any] = {"chain": depth, "depth": drafter.depth}
    for temperature in TEMPERATURES:
        settings = Settings(recipe.eval.max_new_tokens, temperature)
        accepting = [HeadstartSystem("chain", together, (shape, shape)), HeadstartSystem("tree", together, (TREE, TREE))]
        truth = HeadstartSystem(AR, SpeculativeModel(heads.backbone, capture="off"))
        race = raced(Race(truth, [truth, *accepting], asked, settings, len(asked), 0))
        for one in race.results[1:]:
            name = f"{one.system.name}_{temperature:g}"
            found |= {f"tau_{name}": one.total.tau, f"acceptance_{name}": one.total.acceptance_per_depth}
            found[f"prompts_differing_{name}"] = one.differing(race.leader)
        race = raced(Race(plain, [plain, chain, HeadstartSystem("adaptive", heads)], asked[: args.timed_prompts], settings, 1, 0))
        ar = race.leader.total
        found[f"ar_tokens_per_second_{temperature:g}"] = ar.tokens_per_second
        for one in race.results[1:]:
            name, tally = f"{one.system.name}_{temperature:g}", one.total
            found[f"speedup_{name}"] = tally.tokens_per_second / ar.tokens_per_second
            found[f"draft_ms_{name}"] = tally.milliseconds()["draft_ms"]
        found[f"tau_adaptive_{temperature:g}"] = race.results[-1].total.tau
    return found


def raced(race: Race) -> Race:
    race.run(None)
    return race


def measure(name: str, key: dict[str, Any], args: argparse.Namespace, step_tokens: float) -> dict[str, Any]:
    """Train an entry within its budget and decode with it."""
    entry, start = ENTRIES[name], time.perf_counter()
    amount = key["amount"]
    steps = round(amount / step_tokens) if key["budget"] == "tokens" else steps_in(amount, entry, args, step_tokens)
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(entry, args, f"train.steps={max(1, steps)}", f"seed={key['seed']}", f"save.dir={folder}")
        run = train_heads(recipe)
        speeds = training_speeds(Path(folder))
        seconds = sum(tokens / speed for tokens, speed in speeds)
        trained = {
            "parameters": sum(weight.numel() for weight in run.trainers[0].trained.values() if weight.requires_grad),
            "steps": run.done,
            "tokens": run.tokens,
            "seconds": seconds,
            "tokens_per_second": run.tokens / seconds,
        }
        found = decode(Path(folder), recipe, run.prompts, args)
    return {**key, **trained, **found, "run_seconds": time.perf_counter() - start}


def keys_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What identifies each run asked for: seed by seed, so that an interrupted comparison has all entries."""
    sizes = [args.batch_size, args.prompts, args.timed_prompts, args.new_tokens, args.threads]
    shared = {
        "backbone": Path(args.backbone).name if args.backbone else "embedded",
        "settings": [args.train, *sizes, args.capture, *sorted(args.overrides)],
    }
    budgets = [(name, getattr(args, name)) for name in ("tokens", "seconds") if getattr(args, name) is not None]
    runs = [(seed, budget, entry) for seed in args.seeds for budget in budgets for entry in args.only]
    return [{**shared, "entry": entry, "budget": name, "amount": amount, "seed": seed} for seed, (name, amount), entry in runs]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run what is missing in ``args.out``; returns the report of all that it holds."""
    file, failed = args.out / "runs.jsonl", {}
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    keys = [key for key in keys_of(args) if not any({**row, **key} == row for row in rows)]
    step_tokens = tokens_per_step(args) if keys else 0.0
    for number, key in enumerate(keys, 1):
        name = key["entry"]
        if name in failed:
            continue
        try:
            rows.append(measure(name, key, args, step_tokens))
        except Exception as error:   # one head that fails must not end a comparison of hours
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        with file.open("a") as lines:
            lines.write(json.dumps(rows[-1]) + "\n")
        print(f"{number} of {len(keys)}: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    return {"failed": failed, "entries": heads_report.summary(rows)}


def main(args: argparse.Namespace) -> dict[str, Any] | str:
    if (args.backbone is None) != (args.train is None) or (args.train is None) != (args.eval is None):
        raise SystemExit("give --backbone, --train and --eval together, or none of them")
    report = compare(args)
    if args.plot is not None:
        args.plot.write_text(heads_report.plot(report["entries"]))
    return heads_report.table(report["entries"]) if args.table else report


def parser() -> argparse.ArgumentParser:
    options = program.options(__doc__)
    options.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where results go, and what has them already")
    options.add_argument("--tokens", type=int, metavar="N", help="training tokens of a run")
    options.add_argument("--seconds", type=float, metavar="S", help="training seconds of a run")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--only", nargs="+", choices=list(ENTRIES), default=list(ENTRIES), metavar="NAME", help=", ".join(ENTRIES))
    options.add_argument("--backbone", metavar="MODEL", help="folder or hub id (default: the embedded one, with its own data)")
    options.add_argument("--train", metavar="FILE", help="rows to train on, with --backbone")
    options.add_argument("--eval", metavar="FILE", help="held-out rows whose prompts are decoded, with --backbone")
    options.add_argument("--batch-size", type=int, default=4, help="samples of an optimizer step (4)")
    options.add_argument("--prompts", type=int, default=32, help="prompts to decode at each temperature (32)")
    options.add_argument("--timed-prompts", type=int, default=4, help="how many of them to decode one by one, for speed (4)")
    options.add_argument("--new-tokens", type=int, default=64, help="tokens to generate after each prompt (64)")
    options.add_argument("--capture", choices=("auto", "off"), default="auto", help="of forward passes; off is slower (auto)")
    options.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a chart of tau")
    options.add_argument("--table", action="store_true", help="print Markdown instead of JSON")
    options.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of all recipes")
    return options


if __name__ == "__main__":
    program.run(parser(), main)
