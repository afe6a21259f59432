"""The command ``headstart``: subcommands and exit statuses.

A subcommand needs a function of its name in a module of this folder, which takes the parsed arguments and returns the exit status;
a function that adds its arguments; and a line in `COMMANDS`. Its module is imported when it runs, so that ``--help`` does not wait
for torch and transformers.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from headstart import __version__
from headstart.cli import arguments, serving_arguments
from headstart.cli.failures import guarded
from headstart.support.errors import one_line
from headstart.support.streams import open_streams, require_arguments_text


@dataclass(frozen=True)
class Command:
    """A subcommand: the function of its name in ``headstart/cli/<module>.py``."""

    name: str
    module: str
    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    example: str
    function: str = ""
    """Name of the function where it is not the command's."""

    def __call__(self, args: argparse.Namespace) -> int:
        status: int = getattr(importlib.import_module(f"headstart.cli.{self.module}"), self.function or self.name)(args)
        return status


COMMANDS = (
    Command("train", "train", "Train heads by a recipe", arguments.add_train, arguments.TRAIN_EXAMPLE),
    Command("new-recipe", "new_recipe", "Write a recipe for a model, by rule, that fits the hardware", arguments.add_new_recipe,
            arguments.NEW_RECIPE_EXAMPLE, "new_recipe"),
    Command("generate", "decoding", "Continue one prompt, printing tokens as they are accepted", arguments.add_generate,
            arguments.GENERATE_EXAMPLE),
    Command("chat", "decoding", "Chat with the backbone", arguments.add_chat, arguments.CHAT_EXAMPLE),
    Command("bench", "decoding", "Measure heads against autoregressive decoding and transformers' generate", arguments.add_bench,
            arguments.BENCH_EXAMPLE),
    Command("compare", "comparing", "Compare two reports of bench, or several training runs", arguments.add_compare,
            arguments.COMPARE_EXAMPLE),
    Command("tune", "decoding", "Measure step latency on this machine, so that tree sizes fit it from the first token on",
            arguments.add_tune, arguments.TUNE_EXAMPLE),
    Command("cache", "preparing", "Cache target hidden states for training", arguments.add_cache, arguments.CACHE_EXAMPLE),
    Command("serve-features", "preparing", "Print or start the vLLM server that a recipe's hidden states come from",
            arguments.add_serve_features, arguments.SERVE_FEATURES_EXAMPLE, "serve_features"),
    Command("regenerate", "preparing", "Replace the answers of a dataset by the backbone's own", arguments.add_regenerate,
            arguments.REGENERATE_EXAMPLE),
    Command("plan", "preparing", "Estimate memory, disk and time of a training run, and what fits", arguments.add_plan,
            arguments.PLAN_EXAMPLE),
    Command("inspect", "preparing", "Show a training sample and dataset statistics, or the contents of a checkpoint",
            arguments.add_inspect, arguments.INSPECT_EXAMPLE),
    Command("export", "export", "Write heads in the layout of a serving engine, with the line that starts it",
            serving_arguments.add_export, serving_arguments.EXPORT_EXAMPLE),
    Command("push", "push", "Upload heads to the hub with a model card", serving_arguments.add_push, serving_arguments.PUSH_EXAMPLE),
    Command("import", "importing", "Import heads that another trainer wrote", serving_arguments.add_import,
            serving_arguments.IMPORT_EXAMPLE, "import_heads"),
    Command("verify", "verify", "Compare an engine's drafts with Headstart's, token by token, and name the cause of a difference",
            serving_arguments.add_verify, serving_arguments.VERIFY_EXAMPLE),
    Command("schema", "preparing", "Print the JSON schema of recipes, for editors", arguments.add_schema, arguments.SCHEMA_EXAMPLE),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its status, 0 or 1 (a fault in what was decoded or drafted), or that of an error (`failures`)."""
    open_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(words), debug=arguments.DEBUG in words)


def _run(words: list[str]) -> int:
    require_arguments_text(words)
    args = _parser().parse_args(words)
    status: int = args.command(args)
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Report the error in one line, like all user errors."""
        self.exit(2, f"error: {one_line(message)} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="headstart", description="Train lookahead heads on a frozen language model, and decode losslessly with them.")
    parser.add_argument("--version", action="version", version=f"headstart {__version__}")
    subparsers: Any = parser.add_subparsers(required=True, metavar="COMMAND")
    style = argparse.RawDescriptionHelpFormatter
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.about, description=command.about, epilog=command.example, formatter_class=style, allow_abbrev=False
        )
        command.add_arguments(subparser)
        arguments.add_debug(subparser)
        subparser.set_defaults(command=command)
    return parser
