"""The command ``headstart``: subcommands and exit statuses.

A subcommand needs a line in `COMMANDS` and a module of this folder with two functions, one that adds its arguments and one that takes
them parsed and returns the exit status. Of a command line only the module of its subcommand is imported, and modules import libraries
when the command runs, so that ``--help`` does not wait for torch and transformers.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from headstart import __version__
from headstart.cli.arguments import DEBUG, add_debug
from headstart.cli.failures import Guard
from headstart.support.errors import did_you_mean, gone, one_line
from headstart.support.files import require_writable
from headstart.support.text import open_streams, require_arguments_text


@dataclass(frozen=True)
class Command:
    """A subcommand: the functions ``NAME`` and ``add_NAME`` and the text ``NAME_EXAMPLE`` of ``headstart/cli/<module>.py``."""

    name: str
    module: str
    about: str
    function: str = ""
    """NAME where it is not the command's."""

    @property
    def run(self) -> Callable[[argparse.Namespace], int]:
        """What takes the parsed arguments and returns the exit status."""
        function: Callable[[argparse.Namespace], int] = self._of("{}")
        return function

    def add_to(self, subparsers: Any, arguments: bool) -> None:
        """Add the subcommand's parser, with ``arguments`` that its module defines or without."""
        style = argparse.RawDescriptionHelpFormatter
        parser = subparsers.add_parser(
            self.name, help=self.about, description=self.about, epilog=self.example if arguments else None, formatter_class=style,
            allow_abbrev=False,
        )  # fmt: skip
        if arguments:
            self._of("add_{}")(parser)
            add_debug(parser)
            parser.set_defaults(command=self)

    @property
    def example(self) -> str:
        """Examples below the command's help."""
        return str(self._of("{}_EXAMPLE", upper=True))

    def _of(self, form: str, upper: bool = False) -> Any:
        name = self.function or self.name
        return getattr(importlib.import_module(f"headstart.cli.{self.module}"), form.format(name.upper() if upper else name))


COMMANDS = (
    Command("train", "train", "Train heads by a recipe"),
    Command("new-recipe", "preparing", "Write a recipe for a model, by rule, that fits the hardware", "new_recipe"),
    Command("new-head", "own_head", "Write a head of your own, with its recipe and its test, from a working minimum", "new_head"),
    Command("check-head", "own_head", "Hold a head to the contract: what is trained is what decodes", "check_head"),
    Command("generate", "generate", "Continue one prompt, printing tokens as they are accepted"),
    Command("chat", "generate", "Chat with the backbone"),
    Command("bench", "bench", "Measure heads against autoregressive decoding and transformers' generate"),
    Command("compare", "bench", "Compare two reports of bench, or several training runs"),
    Command("compile", "compile", "Compile a model's layers and its heads' drafts for this CPU, once", "compile_layers"),
    Command("cache", "preparing", "Cache target hidden states for training"),
    Command("serve-features", "preparing", "Print or start the vLLM server that a recipe's hidden states come from", "serve_features"),
    Command("regenerate", "preparing", "Replace the answers of a dataset by the backbone's own"),
    Command("plan", "preparing", "Estimate memory, disk and time of a training run, and what fits"),
    Command("inspect", "preparing", "Show a training sample and dataset statistics, or the contents of a checkpoint"),
    Command("export", "serving", "Write heads in the layout of a serving engine, with the line that starts it"),
    Command("push", "serving", "Upload heads to the hub with a model card"),
    Command("import", "serving", "Import heads that another trainer wrote", "import_heads"),
    Command("verify", "serving", "Compare an engine's drafts with Headstart's, token by token, and name the cause of a difference"),
    Command("schema", "preparing", "Print the JSON schema of recipes, for editors"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its status, 0 or 1 (a fault in what was decoded or drafted), or that of an error (`failures`)."""
    open_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    with Guard(debug=DEBUG in words) as guard:
        require_arguments_text(words)
        args = _parsed(words)
        for option in ("json", "html"):
            require_writable(f"--{option}", getattr(args, option, None))
        guard.status = args.command.run(args)
    return guard.status


class _Parser(argparse.ArgumentParser):
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Offer the choice that was probably meant."""
        if action.choices is not None and value not in action.choices and (hint := did_you_mean(str(value), map(str, action.choices))):
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {hint}choose from {', '.join(map(str, action.choices))}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Report the error in one line, like all user errors."""
        named = (word.strip("':(),").partition("=")[0] for word in message.split())
        said = "".join(f"; {one}" for one in dict.fromkeys(map(gone, named)) if one)
        self.exit(2, f"error: {one_line(message + said)} (see {self.prog} --help)\n")


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; changes of a recipe may stand after options too, where argparse finds no positional arguments."""
    parser = _parser(words)
    args, rest = parser.parse_known_args(words)
    if unknown := [word for word in rest if word.startswith("-") or "=" not in word or "overrides" not in args]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.overrides += rest
    return args


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of a command line: only of the subcommand that it names are the arguments known."""
    parser = _Parser(prog="headstart", description="Train lookahead heads on a frozen language model, and decode losslessly with them.")
    parser.add_argument("--version", action="version", version=f"headstart {__version__}")
    subparsers: Any = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_to(subparsers, arguments=command.name in words[:1])
    return parser
