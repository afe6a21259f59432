"""The command ``headstart``: its subcommands, and what becomes of errors.

To add a subcommand: a function here that imports its module and runs it (its docstring is the help), a function that adds its
arguments (in an `arguments` module that imports no library), and a line in `_parser`. Modules are imported once a subcommand runs,
since torch and transformers take seconds, for which ``--help`` need not wait.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from headstart import __version__
from headstart.cli.arguments import (
    BENCH_EXAMPLE,
    CHAT_EXAMPLE,
    GENERATE_EXAMPLE,
    TUNE_EXAMPLE,
    add_bench,
    add_chat,
    add_generate,
    add_tune,
)
from headstart.cli.preparing import (
    CACHE_EXAMPLE,
    INSPECT_EXAMPLE,
    PLAN_EXAMPLE,
    REGENERATE_EXAMPLE,
    add_cache,
    add_inspect,
    add_plan,
    add_regenerate,
)
from headstart.support.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 (tokens differ that must not), 2 (the user's mistake), 130 (interrupted), 141 (nobody reads on)."""
    try:
        given = _parser().parse_args(argv)
        status: int = given.command(given)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())   # what is still unwritten goes nowhere, quietly
        return 141


def generate(given: argparse.Namespace) -> int:
    """Continue one prompt, writing as tokens are accepted."""
    from headstart.cli import decoding as commands

    return commands.generate(given)


def chat(given: argparse.Namespace) -> int:
    """Talk with the backbone, turn by turn."""
    from headstart.cli import decoding as commands

    return commands.chat(given)


def bench(given: argparse.Namespace) -> int:
    """Measure heads against plain decoding and transformers' own generate."""
    from headstart.cli import decoding as commands

    return commands.bench(given)


def tune(given: argparse.Namespace) -> int:
    """Measure this machine, so that trees are as large as pays from the first token on."""
    from headstart.cli import decoding as commands

    return commands.tune(given)


def cache(given: argparse.Namespace) -> int:
    """Write what the backbone knows of every training sample to disk, so that training need not run it."""
    from headstart.cli import preparing as commands

    return commands.cache(given)


def regenerate(given: argparse.Namespace) -> int:
    """Let the backbone itself answer a dataset's prompts, so that heads learn from what it says."""
    from headstart.cli import preparing as commands

    return commands.regenerate(given)


def plan(given: argparse.Namespace) -> int:
    """Say what training by a recipe will need, and what fits, before anything is loaded or trained."""
    from headstart.cli import preparing as commands

    return commands.plan(given)


def inspect(given: argparse.Namespace) -> int:
    """Show a training sample and the data in numbers; or what trained heads are."""
    from headstart.cli import preparing as commands

    return commands.inspect(given)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other mistake."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="headstart", description="Decode with lookahead heads: the backbone's own text, several tokens per pass.")
    parser.add_argument("--version", action="version", version=f"headstart {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_generate(_add_command(commands, "generate", generate, GENERATE_EXAMPLE))
    add_chat(_add_command(commands, "chat", chat, CHAT_EXAMPLE))
    add_bench(_add_command(commands, "bench", bench, BENCH_EXAMPLE))
    add_tune(_add_command(commands, "tune", tune, TUNE_EXAMPLE))
    add_cache(_add_command(commands, "cache", cache, CACHE_EXAMPLE))
    add_regenerate(_add_command(commands, "regenerate", regenerate, REGENERATE_EXAMPLE))
    add_plan(_add_command(commands, "plan", plan, PLAN_EXAMPLE))
    add_inspect(_add_command(commands, "inspect", inspect, INSPECT_EXAMPLE))
    return parser


def _add_command(commands: Any, name: str, command: Callable[[argparse.Namespace], int], example: str) -> argparse.ArgumentParser:
    about = (command.__doc__ or "").rstrip(".")
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about, epilog=example, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.set_defaults(command=command)
    return parser


