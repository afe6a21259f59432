"""The commands around training: ``headstart new-recipe``, ``cache``, ``serve-features``, ``regenerate``, ``plan``, ``inspect``, ``schema``;
and ``compile``. Libraries are imported when a command runs.
"""

import argparse
import json
import sys
from pathlib import Path

from headstart.cli.arguments import BATCH, HEADS, add_loading, add_no_compile, add_recipe, count
from headstart.support.errors import UserError
from headstart.support.files import require_writable, write_json, write_text

NEW_RECIPE_EXAMPLE = """examples:
  headstart new-recipe embedded --data my_chats.jsonl --out recipe.yaml
  headstart new-recipe Qwen/Qwen3-8B
  headstart new-recipe meta-llama/Llama-3.3-70B-Instruct --gpus 8 --memory 80 --data my_chats.jsonl --out recipe.yaml
  headstart new-recipe lmsys/vicuna-7b-v1.5 --method medusa --gpus 1 --memory 40 --data sharegpt"""


def add_new_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="the backbone: a folder, a GGUF file, a hub id, or 'embedded'")
    methods = "eagle3 (default), peagle, block, medusa, medusa2, hydra, eagle, mlp, mtp, draft_model"
    parser.add_argument("--method", default="eagle3", metavar="NAME", help=f"the heads: {methods}")
    parser.add_argument("--for", dest="engine", choices=("llama.cpp",), help="eagle3 heads that this engine reads (norm_output false)")
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
    """Write a recipe for a model; print it and its plan."""
    from headstart.cli.loading import quiet
    from headstart.heads.backbone.model_config import load_config
    from headstart.serving.layouts.llamacpp import recipe_values
    from headstart.support.config import parse
    from headstart.training.plan.plan import find_machine, plan
    from headstart.training.plan.table import lines
    from headstart.training.recipe.recipe import Recipe
    from headstart.training.rules import own_data, propose, read_facts, require_method

    quiet()
    require_method(args.method)  # before the model is read
    own_data("text" if args.data is None else args.data)
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
    extra = {"backbone": {"trust_remote_code": True}} if args.trust_remote_code else {}
    if args.engine is not None:
        extra |= recipe_values(args.method, load_config(args.model, trust_remote_code=args.trust_remote_code))
    proposal, models = propose(facts, args.method, machine, args.data).changed(extra).fitted(machine, facts.path)
    recipe = parse(Recipe, proposal.tree)
    report = plan(recipe, machine, args.tflops, search=False, models=models)  # a search takes half of the time, and `plan` makes it
    write_text(out, proposal.text())
    print(f"wrote     {out}\n", proposal.text(), *lines(report), sep="\n")
    answers = out.with_name(f"{out.stem}-answers.jsonl")
    print(
        f"next      headstart regenerate {out} regenerate.out={answers}    # heads learn best from the model's own answers",
        f"          headstart train {out} data.train={answers}", sep="\n",
    )  # fmt: skip
    write_json(args.json, {"recipe": str(out), "peak": report["memory"]["peak"], "values": proposal.tree})
    return 0


CACHE_EXAMPLE = "example: headstart cache recipes/quickstart/eagle3.yaml cache.dir=out/features"
REGENERATE_EXAMPLE = """examples:
  headstart regenerate recipes/qwen3-0.6b/eagle3.yaml regenerate.out=data/answers.jsonl regenerate.temperature=0.7
  headstart regenerate recipes/qwen3-8b/eagle3.yaml regenerate.out=data/answers.jsonl regenerate.endpoint=http://localhost:8000/v1
  headstart regenerate recipes/qwen3-8b/eagle3.yaml regenerate.out=answers.jsonl cache.dir=out/states features.endpoint=http://localhost:8000"""
SERVE_FEATURES_EXAMPLE = """examples:
  headstart serve-features --gpus 4 recipes/llama-3.3-70b-instruct/eagle3.yaml
  headstart serve-features --run --port 8001 recipes/quickstart/eagle3.yaml"""
PLAN_EXAMPLE = """examples:
  headstart plan recipes/quickstart/eagle3.yaml
  headstart plan recipes/qwen3-8b/eagle3.yaml train.micro_batch=4 --gpus 8 --memory 80 --no-calibration"""
INSPECT_EXAMPLE = """examples:
  headstart inspect recipes/quickstart/eagle3.yaml --row 3
  headstart inspect out/quickstart/eagle3 --json heads.json"""
SCHEMA_EXAMPLE = "example: headstart schema --out recipe-schema.json"


def add_cache(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "training recipe")
    parser.add_argument("--estimate", action="store_true", help="print the size of the cache and write nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON too")


def cache(args: argparse.Namespace) -> int:
    """Cache target hidden states for training."""
    from headstart.training.features.caching import write_cache
    from headstart.training.recipe.recipe import load_recipe

    write_json(args.json, write_cache(load_recipe(args.recipe, args.overrides), args.estimate))
    return 0


def add_serve_features(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "training recipe, whose features.folder the server writes to")
    parser.add_argument("--run", action="store_true", help="start the server, from this environment, instead of printing the line alone")
    parser.add_argument("--port", type=count(1), default=8000, metavar="N", help="port that it listens on (8000)")
    parser.add_argument("--gpus", type=count(1), metavar="N", help="GPUs of a server, by tensor parallelism (1)")
    parser.add_argument("--cpu", action="store_true", help="for vLLM's CPU build (default where there is no accelerator)")


def serve_features(args: argparse.Namespace) -> int:
    """Print the line that starts a vLLM server of a recipe's hidden states, or start it."""
    import torch

    from headstart.cli.loading import quiet
    from headstart.training.features.server import run_server, server_line
    from headstart.training.plan.fake_model import make_fake_models
    from headstart.training.recipe.recipe import load_recipe

    quiet()
    recipe = load_recipe(args.recipe, args.overrides)
    served = {"endpoint": recipe.features.endpoint or [f"http://localhost:{args.port}"]}
    models = make_fake_models(recipe.but({"features": served}), accelerator=not args.cpu)
    cpu = args.cpu or (args.gpus is None and not torch.accelerator.is_available())
    line = server_line(recipe, models.taps, models.backbone.num_layers, port=args.port, gpus=args.gpus, cpu=cpu)
    print(line, flush=True)
    if args.run:
        run_server(line, recipe.features.folder)
    return 0


def add_regenerate(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "recipe whose data.train is answered")
    add_no_compile(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON too")


def regenerate(args: argparse.Namespace) -> int:
    """Replace the answers of a dataset by the backbone's own; the exit status is 1 if rows could not be asked."""
    from headstart.training.recipe.recipe import load_recipe
    from headstart.training.regenerate.regenerate import write_answers

    report = write_answers(load_recipe(args.recipe, args.overrides), compile_first=not args.no_compile)
    write_json(args.json, report)
    return 1 if any(report["set_aside"].values()) else 0


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "training recipe")
    parser.add_argument("--gpus", type=int, metavar="N", help="accelerators that share the batch (default: this machine's, or one)")
    parser.add_argument("--memory", type=float, metavar="GB", help="memory of each (default: this machine's accelerator's, or its RAM)")
    parser.add_argument("--no-calibration", action="store_true", help="skip timing")
    about = "peak of each GPU in bf16 (H100 989, A100 312), for a duration estimated from the arithmetic of a step"
    parser.add_argument("--tflops", type=float, metavar="N", help=about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan as JSON too")


def plan(args: argparse.Namespace) -> int:
    """Estimate memory, disk and time of a training run."""
    from headstart.cli.loading import quiet
    from headstart.training.plan import plan
    from headstart.training.plan import table as plan_table
    from headstart.training.recipe.recipe import load_recipe

    quiet()
    recipe, machine = load_recipe(args.recipe, args.overrides), plan.find_machine(args.gpus, args.memory)
    report = plan.plan(recipe, machine, args.tflops)
    print("\n".join(plan_table.lines(report)), flush=True)
    report |= plan.timed(recipe, report, machine, not args.no_calibration)
    print("\n".join(plan_table.time_lines(report)))
    write_json(args.json, report)
    return 0


def add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="RECIPE|CHECKPOINT", help="a recipe, or a folder of trained heads (or their hub id)")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace values of the recipe")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="sample of the recipe's data to show, counted from 0 (0)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained page that shows the sample")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON too")


def inspect(args: argparse.Namespace) -> int:
    """Show a training sample and dataset statistics, or the contents of a checkpoint."""
    from headstart.cli.loading import quiet
    from headstart.support.terminal import stdout_console
    from headstart.training.inspection import inspect, sample_page

    quiet()
    console = stdout_console()
    report, screen = inspect(args.what, args.overrides, args.row, marks=console.color_system is None)
    if args.html is not None:
        if "sample" not in report:
            raise UserError(f"--html shows a recipe's training sample, and {args.what} is trained heads; leave it out")
        write_text(args.html, sample_page(report, args.what))
    console.print(*screen, sep="\n")
    write_json(args.json, report)
    return 0


def add_schema(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the schema there")


def schema(args: argparse.Namespace) -> int:
    """Print the JSON schema of recipes, or write it to a file."""
    from headstart.training.recipe.recipe import recipe_schema

    require_writable("--out", args.out)
    if args.out:
        write_json(args.out, recipe_schema())
    else:
        print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))
    return 0


COMPILE_LAYERS_EXAMPLE = """examples:
  headstart compile Qwen/Qwen3-0.6B
  headstart compile --heads out/eagle3
  headstart compile SmolLM2-135M-Instruct.Q4_1.gguf --heads smollm2 --batch-size 8
what is compiled is kept for later commands"""


def add_compile_layers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backbone", nargs="?", metavar="MODEL", help="folder, GGUF file, hub id or 'embedded' (default: that of the heads)")
    parser.add_argument("--heads", metavar="DIR", help=f"compile drafts of these too: a folder, a hub id, or {', '.join(HEADS)}")
    parser.add_argument("--batch-size", type=BATCH, default=1, metavar="N", help="sequences decoded together, at most (1)")
    add_loading(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")


def compile_layers(args: argparse.Namespace) -> int:
    """Compile in the foreground, with lines about the progress on standard error."""
    from headstart.cli.loading import backbone_name, backbone_of, quiet
    from headstart.inference.capture.plugin import required
    from headstart.inference.generate import load

    quiet()
    plugin = required()
    if args.backbone is None and args.heads is None:
        raise UserError("no model named; give MODEL, or --heads DIR for the model that they were trained on")
    name = backbone_name(args.backbone, [args.heads] if args.heads else [])
    backbone = backbone_of(name, args)
    heads = load(args.heads, backbone, allow_finetuned=args.allow_finetuned, capture="compile")
    found = plugin.compile_model(heads, lambda line: print(line, file=sys.stderr, flush=True), args.batch_size)
    write_json(args.json, {"backbone": name, "heads": args.heads, **found})
    print(f"compiled {found['parts']} parts in {found['seconds']:.0f} s, kept in {found['folder']}", file=sys.stderr)
    return 0
