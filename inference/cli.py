"""The command ``headstart``: its arguments, and what becomes of errors. What the subcommands do is in `commands`.

That module is imported once a subcommand runs, since torch and transformers take seconds, for which ``--help`` need not wait.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from headstart import __version__
from headstart.heads.errors import UserError

BENCH_EXAMPLE = """example:
  headstart bench --heads out/eagle3 --heads out/medusa --prompts prompts.jsonl --temperature 0 1 --json report.json"""
GENERATE_EXAMPLE = """examples:
  headstart generate --heads out/eagle3 "def fibonacci(n):"
  headstart generate --heads out/eagle3 --temperature 0.7 --seed 1 --file question.txt --json answer.json
  headstart generate --backbone Qwen/Qwen3-0.6B --plain "Why is the sky blue?" """


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
    from headstart.inference import commands

    return commands.generate(given)


def bench(given: argparse.Namespace) -> int:
    """Measure heads against plain decoding and transformers' own generate."""
    from headstart.inference import commands

    return commands.bench(given)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other mistake."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="headstart", description="Decode with lookahead heads: the backbone's own text, several tokens per pass.")
    parser.add_argument("--version", action="version", version=f"headstart {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(_add_command(commands, "generate", generate, GENERATE_EXAMPLE))
    _add_bench(_add_command(commands, "bench", bench, BENCH_EXAMPLE))
    return parser


def _add_command(commands: Any, name: str, command: Callable[[argparse.Namespace], int], example: str) -> argparse.ArgumentParser:
    about = (command.__doc__ or "").rstrip(".")
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=about, description=about, epilog=example, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.set_defaults(command=command)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to continue or answer (default: read the standard input)")
    parser.add_argument("--file", metavar="F", help="read the prompt from this file")
    parser.add_argument("--heads", metavar="DIR", help="heads to draft with: a folder or a hub id (default: plain decoding)")
    parser.add_argument("--plain", action="store_true", help="do not draft: the same text for the same seed, one token per pass")
    parser.add_argument("--echo", action="store_true", help="write the prompt too")
    parser.add_argument("--temperature", type=_number(0), default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--top-k", type=_count(0), default=0, metavar="K", help="sample from the K likeliest tokens (0: from all)")
    parser.add_argument("--top-p", type=_number(0, 1, above=True), default=1.0, metavar="P", help="sample from the likeliest, of chance P")
    parser.add_argument("--seed", type=_count(0), metavar="S", help="seed of the sampling (default: drawn, and told)")
    parser.add_argument("--stop", action="append", metavar="STRING", help="stop once this is written; may be repeated")
    _add_shared(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", action="extend", nargs="+", required=True, metavar="DIR", help="heads to measure: folders or hub ids")
    parser.add_argument("--prompts", required=True, metavar="FILE", help=".jsonl, .jsonl.gz, or .txt with one prompt a line")
    parser.add_argument("--limit", type=_count(1), metavar="N", help="the first N prompts only")
    parser.add_argument("--prompt-tokens", type=_count(1), default=64, metavar="N", help="how much of a plain text is the prompt (64)")
    parser.add_argument("--temperature", type=_number(0), action="extend", nargs="+", metavar="T", help="may be many; 0: greedy (default)")
    parser.add_argument("--seed", type=_count(0), default=0, metavar="S", help="seed of the first prompt (0)")
    parser.add_argument("--sampled-nodes", type=_count(1), metavar="N", help="--nodes above temperature 0 (default: the same)")
    parser.add_argument("--sampled-width", type=_count(1), metavar="W", help="--width above temperature 0 (default: the same)")
    _add_shared(parser)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backbone", metavar="PATH", help="folder, hub id or 'embedded' (default: what the heads were trained on)")
    parser.add_argument("--other-backbone", action="store_true", help="allow a fine-tune of the backbone the heads were trained on")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's repository; read it first")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help="of the backbone (auto: fp32 on the CPU)")
    parser.add_argument("--threads", type=_count(1), metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--max-new-tokens", type=_count(1), default=128, metavar="N", help="how much to write (128)")
    parser.add_argument("--nodes", type=_count(1), default=24, metavar="N", help="size of a candidate tree, its root included (24)")
    parser.add_argument("--width", type=_count(1), default=8, metavar="W", help="how many nodes of a depth are followed (8)")
    parser.add_argument("--depth", type=_count(1), metavar="K", help="how many tokens ahead (default: all that the heads draft)")
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_const", const=True, help="use the chat template (default if there is one)")
    style.add_argument("--raw", dest="chat", action="store_const", const=False, help="continue the prompt as it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")


def _count(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number of at least {least} is needed; got {text!r}")
        return int(text)

    return read


def _number(least: float, most: float = math.inf, above: bool = False) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least < value if above else least <= value) or not value <= most or math.isinf(value):
            span = f"{'above' if above else 'from'} {least:g}" + ("" if math.isinf(most) else f" to {most:g}")
            raise argparse.ArgumentTypeError(f"a number {span} is needed; got {text!r}")
        return value

    return read


if __name__ == "__main__":
    sys.exit(main())
