"""Compares objectives by acceptance: EAGLE-3 on the embedded backbone, with the same training tokens and several seeds for each.

    python benchmarks/objectives.py [a.b=c ...] --json out/objectives.json [--tokens 700000] [--seeds 0 1 2] [--objectives kl ce ...]

Trains recipes/quickstart/eagle3.yaml, changing only the objective, the seed, the number of steps and the given ``a.b=c`` settings, then
decodes held-out prompts at temperatures 0 and 1. The file is written after every run; runs that it already holds with the same settings
are skipped, and an interrupted run resumes from its last checkpoint. Prints JSON: every run's mean acceptance length (tau, the backbone's
own token included) and acceptance per depth, and the mean and standard deviation over the seeds of each objective.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.support.files import write_json
from headstart.training.data.data import load_data
from headstart.training.log.evaluate import evaluate
from headstart.training.loop import train
from headstart.training.recipe.recipe import Recipe, load_recipe
from headstart.training.setup import prepare

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart" / "eagle3.yaml"
TERMS = {
    "kl": "{kl: 1.0}",
    "ce": "{ce: 1.0}",
    "ce_tv": "{ce: 0.1, tv: 0.9}",
    "lk": "{lk: 1.0}",
    "lk_alpha": "{lk_alpha: 1.0}",
}
OBJECTIVES = {
    f"{name}{suffix}": [f"objective.terms={terms}", f"objective.depth_weights={weights}"]
    for weights, suffix in (("geometric", ""), ("expected", "_expected"))
    for name, terms in TERMS.items()
}
ASKED = ["kl", "ce", "ce_tv", "lk", "kl_expected", "ce_tv_expected"]


def steps_of(recipe: Recipe, tokens: int) -> int:
    """The number of optimizer steps that process about that many tokens."""
    stats = load_data(recipe.data, load_tokenizer(recipe.backbone.path), recipe.data.max_length, progress=False).stats
    return max(1, round(tokens * stats.samples / stats.tokens / recipe.train.batch_size))


def key_of(name: str, seed: int, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """The settings that identify a run."""
    return {"objective": name, "seed": seed, "steps": steps, "prompts": args.prompts, "overrides": sorted(args.overrides)}


def run_one(name: str, seed: int, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train, then decode at both temperatures."""
    folder = args.work / f"{name}-{seed}-{steps}"
    given = [f"train.steps={steps}", f"seed={seed}", f"save.dir={folder}", "save.every=50", "save.keep=1", f"eval.prompts={args.prompts}"]
    run = prepare(load_recipe(RECIPE, [*args.overrides, *OBJECTIVES[name], *given]))
    try:
        status = train(run)
    finally:
        run.log.close()
    if status:
        sys.exit(status)
    row: dict[str, Any] = {**key_of(name, seed, steps, args), "tokens": run.tokens}
    for temperature in (0.0, 1.0):
        found = evaluate(run.drafter, run.prompts, run.recipe.eval.model_copy(update={"temperature": temperature}), seed=0)
        row[f"tau_{temperature:g}"] = round(found["tau"], 4)
        row[f"accepted_{temperature:g}"] = [round(rate, 4) for rate in found["acceptance_per_depth"]]
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The mean and standard deviation of tau over the seeds of each objective."""
    told = {}
    for name in dict.fromkeys(row["objective"] for row in rows):
        own = [row for row in rows if row["objective"] == name]
        told[name] = {"runs": len(own)}
        for key in ("tau_0", "tau_1"):
            values = [row[key] for row in own]
            spread = statistics.stdev(values) if len(values) > 1 else math.nan
            told[name][key] = f"{statistics.mean(values):.3f} ± {spread:.3f}" if len(values) > 1 else f"{values[0]:.3f}"
    return told


def main(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    steps = steps_of(load_recipe(RECIPE, [*args.overrides, "save.dir=out"]), args.tokens)
    rows: list[dict[str, Any]] = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    for seed in args.seeds:
        for name in args.objectives:
            key = key_of(name, seed, steps, args)
            if any({**row, **key} == row for row in rows):
                continue
            rows.append(run_one(name, seed, steps, args))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            write(rows, args.json)
    return {"rows": rows, "summary": summary(rows)}


def write(rows: list[dict[str, Any]], path: Path) -> None:
    write_json(path, {"rows": rows, "summary": summary(rows)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where results go, and what has them already")
    parser.add_argument("--tokens", type=int, default=700_000, help="to train on, a run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--objectives", nargs="+", choices=list(OBJECTIVES), default=ASKED)
    parser.add_argument("--prompts", type=int, default=40, help="to decode at each temperature")
    parser.add_argument("--work", type=Path, default=Path("out/objectives"), help="folder of the trained heads")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    print(json.dumps(main(parser.parse_args()), indent=2))
