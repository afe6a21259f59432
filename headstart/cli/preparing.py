"""The commands around training: ``headstart cache``, ``regenerate``, ``plan``, ``inspect`` and ``schema``.

Libraries are imported when a command runs.
"""

from __future__ import annotations

import argparse
import json


def cache(args: argparse.Namespace) -> int:
    """Cache target hidden states for training."""
    from headstart.support.files import require_writable, write_json
    from headstart.training.features.caching import write_cache
    from headstart.training.recipe.recipe import load_recipe

    require_writable("--json", args.json)
    write_json(args.json, write_cache(load_recipe(args.recipe, args.overrides), args.estimate))
    return 0


def regenerate(args: argparse.Namespace) -> int:
    """Replace the answers of a dataset by the backbone's own."""
    from headstart.support.files import require_writable, write_json
    from headstart.training.recipe.recipe import load_recipe
    from headstart.training.regenerate.regenerate import write_answers

    require_writable("--json", args.json)
    write_json(args.json, write_answers(load_recipe(args.recipe, args.overrides)))
    return 0


def serve_features(args: argparse.Namespace) -> int:
    """Print the line that starts a vLLM server of a recipe's hidden states, or start it."""
    from headstart.cli.loading import quiet
    from headstart.training.features.serve import on_cpu, run_server, server_line
    from headstart.training.plan.fake_model import make_fake_models
    from headstart.training.recipe.recipe import load_recipe

    quiet()
    recipe = load_recipe(args.recipe, args.overrides)
    served = recipe.features.model_copy(update={"endpoint": recipe.features.endpoint or [f"http://localhost:{args.port}"]})
    models = make_fake_models(recipe.model_copy(update={"features": served}), accelerator=not args.cpu)
    cpu = args.cpu or (args.gpus is None and on_cpu())
    line = server_line(recipe, models.taps, models.backbone.num_layers, port=args.port, gpus=args.gpus, cpu=cpu)
    print(line, flush=True)
    if args.run:
        run_server(line, recipe.features.folder)
    return 0


def plan(args: argparse.Namespace) -> int:
    """Estimate memory, disk and time of a training run."""
    from headstart.cli.loading import quiet
    from headstart.support.files import require_writable, write_json
    from headstart.training.plan import plan
    from headstart.training.plan import table as plan_table
    from headstart.training.recipe.recipe import load_recipe

    require_writable("--json", args.json)
    quiet()
    report = plan.plan(load_recipe(args.recipe, args.overrides), args.gpus, args.memory, not args.no_calibration, args.tflops)
    print("\n".join(plan_table.lines(report)))
    write_json(args.json, report)
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Show a training sample and dataset statistics, or the contents of a checkpoint."""
    from headstart.cli.loading import quiet
    from headstart.support.console import stdout_console
    from headstart.support.errors import UserError
    from headstart.support.files import require_writable, write_json, write_text
    from headstart.training.inspect.command import inspect
    from headstart.training.inspect.page import sample_page

    require_writable("--json", args.json)
    require_writable("--html", args.html)
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


def schema(args: argparse.Namespace) -> int:
    """Print the JSON schema of recipes or write it to a file; with ``--tables``, update the tables of a Markdown page."""
    from headstart.support.files import require_writable, write_json, write_text
    from headstart.support.text import read_text
    from headstart.training.recipe.schema import recipe_schema, with_tables

    require_writable("--out", args.out)
    require_writable("--tables", args.tables)
    if args.tables:
        write_text(args.tables, with_tables(read_text("--tables", args.tables)))
    if args.out:
        write_json(args.out, recipe_schema())
    elif not args.tables:
        print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))
    return 0
