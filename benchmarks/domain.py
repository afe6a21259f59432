"""Adapts trained EAGLE-3 heads to another domain: all weights or LoRA, tau before and after on both domains.

    python benchmarks/domain.py --backbone DIR --train-a stories.jsonl --eval-a more.jsonl --train-b chats.jsonl --eval-b more.jsonl

Trains heads on domain A, then from these (``drafter.init``) on domain B: by LoRA (``drafter.lora``) and, for comparison, all weights.
Prints JSON: for each the trained parameters, the share of label tokens in the draft vocabulary, and the mean acceptance length (tau, the
backbone's own token included) in a tree and accepted per depth at temperature 0, on held-out prompts of both domains.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from program import options, run
from torch import Tensor

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.support.config import parse
from headstart.training.data.data import load_data, prompts
from headstart.training.log.evaluate import evaluate
from headstart.training.loop import train
from headstart.training.recipe.recipe import Recipe
from headstart.training.setup import Run, prepare

LEARNING = {"batch_size": 4, "optimizer": "adamw", "min_lr_ratio": 0.1}


def recipe_of(args: argparse.Namespace, folder: Path, domain: str, drafter: dict[str, Any], train: dict[str, Any]) -> Recipe:
    sections: dict[str, Any] = {
        "backbone": {"path": args.backbone},
        "drafter": {"kind": "eagle3", "depth": args.depth, "draft_vocab_size": args.draft_vocab_size, **drafter},
        "data": {"train": getattr(args, f"train_{domain}"), "eval": getattr(args, f"eval_{domain}"), "max_length": 256, "limit": args.rows},
        "train": {**LEARNING, **train},
        "eval": {"prompts": args.prompts, "prompt_tokens": 64, "max_new_tokens": 64},
        "save": {"dir": str(folder)},
        "log": {"every": 20},
        "seed": args.seed,
    }  # fmt: skip
    return parse(Recipe, sections)


def held_out(recipe: Recipe) -> list[Tensor]:
    """The prompts of a domain."""
    splits = load_data(recipe.data, load_tokenizer(recipe.backbone.path), recipe.data.max_length, progress=False)
    return prompts(splits.eval, recipe.eval, 512)


def measured(trained: Run, asked: dict[str, list[Tensor]]) -> dict[str, Any]:
    """The trained heads on the prompts of both domains."""
    (trainer,) = trained.trainers
    weights = [weight.numel() for weight in trainer.drafter.parameters() if weight.requires_grad]
    own = [weight.numel() for name, weight in trainer.drafter.named_parameters() if ".lora_" not in name]
    row: dict[str, Any] = {"tokens": trained.tokens, "trained": sum(weights), "of": sum(own), "share": round(sum(weights) / sum(own), 4)}
    row["draft_vocabulary"] = trainer.coverage
    with trainer.eval_weights() as drafter:
        for domain, given in asked.items():
            found = evaluate(drafter, given, trained.recipe.eval, seed=0)
            row[f"tau_{domain}"] = round(found["tau"], 3)
            row[f"accepted_{domain}"] = [round(rate, 3) for rate in found["acceptance_per_depth"]]
    return row


def one(recipe: Recipe, asked: dict[str, list[Tensor]]) -> dict[str, Any]:
    trained = prepare(recipe)
    try:
        if train(trained):
            sys.exit(1)   # stopped by a signal
    finally:
        trained.log.close()
    return measured(trained, asked)


def main(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        first = recipe_of(args, work / "a", "a", {}, {"steps": args.steps, "lr": args.lr})
        start = {"init": str(work / "a")}
        adapter = {**start, "lora": {"rank": args.rank, "alpha": 2.0 * args.rank}}
        lora = recipe_of(args, work / "lora", "b", adapter, {"steps": args.adapt_steps, "lr": args.lora_lr})
        whole = recipe_of(args, work / "whole", "b", start, {"steps": args.adapt_steps, "lr": args.lr / 3})
        asked = {"a": held_out(first), "b": held_out(lora)}
        return {"trained on a": one(first, asked), "adapted to b by LoRA": one(lora, asked), "adapted to b, all weights": one(whole, asked)}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--backbone", default="embedded")
    for domain in ("a", "b"):
        parser.add_argument(f"--train-{domain}", required=True, metavar="FILE", help=f"domain {domain.upper()}: rows to train on")
        parser.add_argument(f"--eval-{domain}", required=True, metavar="FILE", help=f"domain {domain.upper()}: rows to measure on")
    parser.add_argument("--rows", type=int, help="at most, of each training file")
    parser.add_argument("--steps", type=int, default=300, help="on domain A, of 4 samples")
    parser.add_argument("--adapt-steps", type=int, default=100, help="on domain B")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--draft-vocab-size", type=int)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lora-lr", type=float, default=2e-3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    run(parser, main)
