"""Commands that prepare a training run: ``headstart cache``. Libraries are imported once a command runs.

    python -m headstart.training.commands cache RECIPE [section.key=value ...]      the same, without the front door
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from headstart.heads.errors import UserError

CACHE_EXAMPLE = "example: headstart cache recipes/quickstart/eagle3.yaml cache.dir=out/features"


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``headstart cache``."""
    parser.add_argument("recipe", metavar="RECIPE", help="the recipe that will be trained by")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace what the recipe says")
    parser.add_argument("--estimate", action="store_true", help="say how large the cache will be, and write nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON as well")


def cache(given: argparse.Namespace) -> int:
    """Write what the backbone knows of every training sample to disk, so that training need not run it."""
    from headstart.inference.cli.files import require_writable, write_json
    from headstart.training.caching import write_cache
    from headstart.training.recipe import load_recipe

    require_writable("--json", given.json)
    write_json(given.json, write_cache(load_recipe(given.recipe, given.overrides), given.estimate))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 for the user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m headstart.training.commands", description="Prepare a training run.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("cache", help=cache.__doc__, description=cache.__doc__, epilog=CACHE_EXAMPLE)
    add_cache(one)
    one.set_defaults(command=cache)
    try:
        given = parser.parse_args(argv)
        status: int = given.command(given)
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from there", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
