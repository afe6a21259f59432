"""Commands that prepare a training run: ``headstart cache``, ``regenerate``, ``plan`` and ``inspect``.

Libraries are imported once a command runs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

CACHE_EXAMPLE = "example: headstart cache recipes/quickstart/eagle3.yaml cache.dir=out/features"
REGENERATE_EXAMPLE = """examples:
  headstart regenerate recipes/qwen3-0.6b/eagle3.yaml regenerate.out=data/answers.jsonl regenerate.temperature=0.7
  headstart regenerate recipes/qwen3-8b/eagle3.yaml regenerate.out=data/answers.jsonl regenerate.endpoint=http://localhost:8000/v1"""

PLAN_EXAMPLE = """examples:
  headstart plan recipes/quickstart/eagle3.yaml
  headstart plan recipes/qwen3-8b/eagle3.yaml train.micro_batch=4 --gpus 8 --memory 80 --no-calibration"""
INSPECT_EXAMPLE = """examples:
  headstart inspect recipes/quickstart/eagle3.yaml --row 3
  headstart inspect out/quickstart/eagle3 --json heads.json"""

def add_cache(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart cache``."""
    parser.add_argument("recipe", metavar="RECIPE", help="the recipe that will be trained by")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace what the recipe says")
    parser.add_argument("--estimate", action="store_true", help="say how large the cache will be, and write nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON as well")


def cache(given: argparse.Namespace) -> int:
    """Write what the backbone knows of every training sample to disk, so that training need not run it."""
    from headstart.support.files import require_writable, write_json
    from headstart.training.features.caching import write_cache
    from headstart.training.recipe.recipe import load_recipe

    require_writable("--json", given.json)
    write_json(given.json, write_cache(load_recipe(given.recipe, given.overrides), given.estimate))
    return 0


def add_regenerate(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart regenerate``."""
    parser.add_argument("recipe", metavar="RECIPE", help="the recipe whose data.train is to be answered")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace what the recipe says")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON as well")


def regenerate(given: argparse.Namespace) -> int:
    """Let the backbone itself answer a dataset's prompts, so that heads learn from what it says."""
    from headstart.support.files import require_writable, write_json
    from headstart.training.recipe.recipe import load_recipe
    from headstart.training.regenerate.regenerate import write_answers

    require_writable("--json", given.json)
    write_json(given.json, write_answers(load_recipe(given.recipe, given.overrides)))
    return 0


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart plan``."""
    parser.add_argument("recipe", metavar="RECIPE", help="the recipe that will be trained by")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace what the recipe says")
    parser.add_argument("--gpus", type=int, metavar="N", help="accelerators that share the batch (default: what this machine has, one)")
    parser.add_argument("--memory", type=float, metavar="GB", help="memory of each (default: this machine's accelerator's, or its RAM)")
    parser.add_argument("--no-calibration", action="store_true", help="take no steps to time them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan as JSON as well")


def plan(given: argparse.Namespace) -> int:
    """Say what training by a recipe will need, and what fits, before anything is loaded or trained."""
    from headstart.cli.loading import quiet
    from headstart.support.files import require_writable, write_json
    from headstart.training.plan import plan
    from headstart.training.plan import table as plan_table
    from headstart.training.recipe.recipe import load_recipe

    require_writable("--json", given.json)
    quiet()
    report = plan.plan(load_recipe(given.recipe, given.overrides), given.gpus, given.memory, not given.no_calibration)
    print("\n".join(plan_table.lines(report)))
    write_json(given.json, report)
    return 0


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart inspect``."""
    parser.add_argument("what", metavar="RECIPE|CHECKPOINT", help="a recipe, or a folder of trained heads (or their hub id)")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="of a recipe: replace what it says")
    parser.add_argument("--row", type=int, default=0, metavar="N", help="of a recipe: show this sample, counted from 0 (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is found as JSON as well")


def inspect(given: argparse.Namespace) -> int:
    """Show a sample with what is learned of it, the data in numbers and what heads will read; or what trained heads are."""
    from headstart.cli.loading import quiet
    from headstart.support.files import require_writable, write_json
    from headstart.training.inspect.inspection import inspect

    require_writable("--json", given.json)
    quiet()
    found, lines = inspect(given.what, given.overrides, given.row)
    print("\n".join(lines))
    write_json(given.json, found)
    return 0
