"""``headstart new-recipe``: a recipe for a model, by rule. Libraries are imported when the command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from headstart.support.errors import UserError

NEW_RECIPE_EXAMPLE = """examples:
  headstart new-recipe embedded --data my_chats.jsonl --out recipe.yaml
  headstart new-recipe Qwen/Qwen3-8B
  headstart new-recipe meta-llama/Llama-3.3-70B-Instruct --gpus 8 --memory 80 --data my_chats.jsonl --out recipe.yaml
  headstart new-recipe lmsys/vicuna-7b-v1.5 --method medusa --gpus 1 --memory 40 --data sharegpt"""


def add_new_recipe(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart new-recipe``."""
    parser.add_argument("model", metavar="MODEL", help="the backbone: a folder, a GGUF file, a hub id, or 'embedded'")
    methods = "eagle3 (default), block, medusa, medusa2, hydra, eagle, mlp, mtp, draft_model"
    parser.add_argument("--method", default="eagle3", metavar="NAME", help=f"the heads: {methods}")
    data = "ultrachat, sharegpt, perfectblend, mix, text, a file of rows, or a dataset's name (default: ultrachat, or text without chat)"
    parser.add_argument("--data", metavar="NAME", help=data)
    parser.add_argument("--gpus", type=int, metavar="N", help="accelerators that share the batch (default: this machine's, or one)")
    parser.add_argument("--memory", type=float, metavar="GB", help="memory of each (default: this machine's accelerator's, or its RAM)")
    parser.add_argument("--tflops", type=float, metavar="N", help="peak of each GPU in bf16 (H100 989), for an estimate of the duration")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the recipe to write (default: MODEL/METHOD.yaml)")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it is there")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's repository")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the values as JSON too")


def new_recipe(args: argparse.Namespace) -> int:
    """Write a recipe for a model; say what it assumes."""
    from headstart.cli.loading import quiet
    from headstart.support.files import require_writable, write_json, write_text
    from headstart.support.text import gigabytes
    from headstart.training.plan.plan import find_machine
    from headstart.training.rules.methods import find_method, read_facts
    from headstart.training.rules.propose import propose
    from headstart.training.rules.text import recipe_text

    quiet()
    find_method(args.method)  # before anything is read
    machine = find_machine(args.gpus, args.memory)
    if not args.model.strip():
        raise UserError("MODEL is a folder with config.json, a hub id, or 'embedded'; got empty text")
    facts = read_facts(args.model, trust_remote_code=args.trust_remote_code)
    out: Path = args.out or Path(facts.name) / f"{args.method}.yaml"
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out} is to end in .yaml, as recipes do")
    if out.exists() and not out.is_dir() and not args.overwrite:
        raise UserError(f"{out} is there already; name another file with --out, or replace it with --overwrite")
    require_writable("--out", out)
    if args.tflops is not None and not 0 < args.tflops < float("inf"):
        raise UserError(f"--tflops is a number above 0, the peak of one GPU in TFLOP/s; got {args.tflops:g}")
    proposal = propose(facts, args.method, machine, args.data).fitted(tflops=args.tflops)
    assert proposal.figures is not None
    extra = {"backbone": {"trust_remote_code": True}} if args.trust_remote_code else {}
    tree = {key: {**value, **extra.get(key, {})} for key, value in proposal.tree.items()}
    write_text(out, recipe_text(proposal, str(out), values=tree))
    print(f"wrote     {out}")
    for assumption in proposal.assumed:
        print(f"assumed   {assumption}")
    print(f"fits      {gigabytes(proposal.figures.peak)} at most of {gigabytes(machine.usable)} usable; headstart plan {out} says more")
    print(f"next      headstart train {out}")
    write_json(args.json, {"recipe": str(out), "assumed": list(proposal.assumed), "peak": proposal.figures.peak, "values": tree})
    return 0
