"""The command ``headstart``: subcommands, and the last line of defence: whatever leaves a command becomes one line and an exit status.

A subcommand needs a line in `COMMANDS` and a module of this folder with two functions, one that adds its arguments and one that takes
them parsed and returns the exit status. Of a command line only the module of its subcommand is imported, and modules import libraries
when the command runs, so that ``--help`` does not wait for torch and transformers.

| status | |
|---|---|
| 2 | a user's mistake, or too little memory, a full disk, no connection: the line says what to change |
| 70 | an error nobody foresaw: the traceback is in a file that the line names |
| 130, 141 | interrupted; the reader of the output has left |

``--debug``, or HEADSTART_DEBUG=1, prints the traceback too.
"""

import argparse
import errno
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from headstart import __version__
from headstart.cli.arguments import DEBUG, add_debug
from headstart.support.errors import UserError, cause, did_you_mean, gone, one_line
from headstart.support.files import cache_folder, require_writable
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
            self.name, help=self.about, description=self.about, formatter_class=style, allow_abbrev=False,
            epilog=self.example if arguments else None,
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
    Command("new-head", "train", "Write a head of your own, with its recipe and its test, from a working minimum", "new_head"),
    Command("check-head", "train", "Hold a head to the contract: what is trained is what decodes", "check_head"),
    Command("generate", "generate", "Continue one prompt, printing tokens as they are accepted"),
    Command("chat", "generate", "Chat with the backbone"),
    Command("bench", "bench", "Measure heads against autoregressive decoding and transformers' generate"),
    Command("compare", "bench", "Compare two reports of bench, or several training runs"),
    Command("compile", "preparing", "Compile a model's layers and its heads' drafts for this CPU, once", "compile_layers"),
    Command("cache", "preparing", "Cache target hidden states for training"),
    Command("serve-features", "preparing", "Print or start the vLLM server that a recipe's hidden states come from", "serve_features"),
    Command("regenerate", "preparing", "Replace the answers of a dataset by the backbone's own"),
    Command("plan", "preparing", "Estimate memory, disk and time of a training run, and what fits"),
    Command("inspect", "preparing", "Show a training sample and dataset statistics, or the contents of a checkpoint"),
    Command("quantize", "serving", "Round heads to 4 bits, which draft faster on a CPU"),
    Command("export", "serving", "Write heads in the layout of a serving engine, with the line that starts it"),
    Command("push", "serving", "Upload heads to the hub with a model card"),
    Command("import", "serving", "Import heads that another trainer wrote", "import_heads"),
    Command("verify", "serving", "Compare an engine's drafts with Headstart's, token by token, and name the cause of a difference"),
    Command("schema", "preparing", "Print the JSON schema of recipes, for editors"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its status, 0 or 1 (a fault in what was decoded or drafted), or that of an error (`Guard`)."""
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
        said = "".join(f"; {hint}" for hint in dict.fromkeys(map(gone, named)) if hint)
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


USER, UNFORESEEN, INTERRUPTED, BROKEN_PIPE = 2, 70, 130, 141
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Guard:
    """A context in which whatever is raised becomes one line on standard error and a `status`."""

    folder: Path | None = None
    """Where a traceback is logged, if known."""
    debug: bool = False
    status: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        try:
            if error is None:
                sys.stdout.flush()
        except Exception as fault:
            error = fault
        if isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr)
            self.status = INTERRUPTED
        elif isinstance(error, BrokenPipeError):
            with suppress(OSError, ValueError, AttributeError):  # no file behind it; else output that is not written yet goes nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.status = BROKEN_PIPE
        elif isinstance(error, UserError):
            self.status = report(str(error), USER)
        elif isinstance(error, Exception):
            if self.debug or os.environ.get("HEADSTART_DEBUG", "0") not in ("", "0"):
                traceback.print_exception(error)
            known = _known(error)
            self.status = report(known, USER) if known else report(_unforeseen(error, self.folder), UNFORESEEN)
        return error is None or isinstance(error, KeyboardInterrupt | Exception)


def report(line: str, status: int, wait: bool = True) -> int:
    """Print the error and return the status. Of several processes that have it, the first one speaks, and its end ends the others."""
    if rank() and wait:
        time.sleep(15)
    print(f"error: {line}" if rank() == 0 else f"error (process {rank()}): {line}", file=sys.stderr, flush=True)
    return status


def rank() -> int:
    """Return the number of this process of several."""
    return int(os.environ.get("RANK", "0"))


def _known(error: Exception) -> str | None:
    """Say what to try, for errors of the machine; None for others."""
    names = {kind.__name__ for kind in type(error).__mro__}
    said = cause(error)
    smaller = "lower the batch, the context (--max-new-tokens, data.max_length) or --nodes"
    if "OutOfMemoryError" in names:  # torch's, of an accelerator
        return f"the accelerator is out of memory ({said}); {smaller}"
    if isinstance(error, MemoryError) or "can't allocate memory" in said or "not enough memory" in said:
        return f"out of memory ({said}); {smaller}, or close other programs"
    if isinstance(error, OSError) and error.errno in FULL:
        return f"the disk is full ({said}); make room there, and run the same command again"
    if isinstance(error, ConnectionError | TimeoutError) or names & {"TransportError", "NetworkError", "ConnectTimeout", "ReadTimeout"}:
        return f"the connection was lost ({type(error).__name__}: {said}); check the network and run the same command again"
    return None


def _unforeseen(error: Exception, folder: Path | None) -> str:
    what = f"{type(error).__name__}: {cause(error)}"
    if isinstance(error, RecursionError):
        what = f"{what} (something is nested too deep: an input, or a path of links)"
    if any(kind.__name__ == "AcceleratorError" for kind in type(error).__mro__) or "CUDA error" in what:
        what = f"{what} (the accelerator failed or was lost: see its driver's log; a new process may have it again, and training goes on)"
    log = _log(error, folder)
    where = f"the details are in {log}" if log else "the details could not be written; --debug prints them"
    return f"unforeseen, and not your mistake: {what}; {where}, please report it with them"


def _log(error: Exception, folder: Path | None) -> Path | None:
    """Write the traceback into ``folder``, if it is there, or below the cache folder; returns the file, or None if neither works."""
    home = cache_folder() / "failures"
    text = "".join(traceback.format_exception(error))
    for place in ([folder] if folder is not None and folder.is_dir() else []) + [home]:
        try:
            place.mkdir(parents=True, exist_ok=True)
            name = time.strftime("failure-%Y%m%d-%H%M%S-")
            handle, file = tempfile.mkstemp(".txt", name, place)  # private: tracebacks may hold parts of prompts
            with open(handle, "w", encoding="utf-8", errors="backslashreplace") as log:
                log.write(f"headstart {__version__}, Python {sys.version.split()[0]}\n{' '.join(map(repr, sys.argv))}\n\n{text}")
            return Path(file)
        except OSError:
            continue
    return None
