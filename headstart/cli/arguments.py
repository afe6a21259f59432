"""Arguments that several commands share, and numbers on the command line, within their limits.

Commands import no libraries before they run, so that ``--help`` is fast.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstart.support.config import MAX_BATCH, MAX_DEPTH, MAX_NODES, MAX_SEED, MAX_WIDTH, TEMPERATURES, is_temperature, max_threads
from headstart.support.hub import HEADS

DEBUG = "--debug"
PROPOSERS, NO_PROPOSERS = ("suffix", "recycling", "history"), "none"
MAX_COUNT = (1 << 63) - 1


def count(least: int, most: int = MAX_COUNT) -> Callable[[str], int]:
    """Return a parser of integers from ``least`` to ``most``."""

    def read(text: str) -> int:
        digits = text if text.isascii() and text.isdecimal() and len(text) < 20 else "-1"
        if not least <= int(digits) <= most:
            upper = "" if most == MAX_COUNT else f" and at most {most}"
            raise argparse.ArgumentTypeError(f"a whole number of at least {least}{upper} is needed; got {text[:40]!r}")
        return int(text)

    return read


def number(least: float, most: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """Return a parser of numbers from ``least`` (exclusive with ``above``) to ``most``."""

    def read(text: str) -> float:
        value = _float(text)
        if not (least < value if above else least <= value) or not value <= most or math.isinf(value):
            span = f"{'above' if above else 'from'} {least:g}" + ("" if math.isinf(most) else f" to {most:g}")
            raise argparse.ArgumentTypeError(f"a number {span} is needed; got {text[:40]!r}")
        return value

    return read


def temperature(text: str) -> float:
    if not is_temperature(value := _float(text)):
        raise argparse.ArgumentTypeError(f"a temperature is {TEMPERATURES}; got {text[:40]!r}")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


BATCH, NODES, WIDTH, DEPTH = count(1, MAX_BATCH), count(1, MAX_NODES), count(1, MAX_WIDTH), count(1, MAX_DEPTH)
THREADS, SEED = count(1, max_threads()), count(0, MAX_SEED)


def add_debug(parser: argparse.ArgumentParser) -> None:
    """The argument of every command that `Guard` reads."""
    parser.add_argument(DEBUG, action="store_true", help="print the traceback of an unforeseen error (or HEADSTART_DEBUG=1)")


def add_recipe(parser: argparse.ArgumentParser, about: str) -> None:
    """The recipe of a command, and changes of it."""
    parser.add_argument("recipe", metavar="RECIPE", help=about)
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace values of the recipe")


def add_one_text(parser: argparse.ArgumentParser) -> None:
    """Arguments of the commands that write one text at a time; ``usual``: their proposers beside heads, if none were requested."""
    parser.set_defaults(usual=["suffix"])
    heads = f"heads to draft with: a folder, a hub id, or those that ship: {', '.join(HEADS)} (default: autoregressive decoding)"
    parser.add_argument("--heads", metavar="DIR", help=heads)
    parser.add_argument("--no-draft", action="store_true", help="decode without heads: the same text (transformers' own generate: in fp32)")
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--top-k", type=count(0), default=0, metavar="K", help="sample from the K most probable tokens (0: from all)")
    about = "nucleus sampling: from the most probable tokens that reach P together"
    parser.add_argument("--top-p", type=number(0, 1, above=True), default=1.0, metavar="P", help=about)
    parser.add_argument("--seed", type=SEED, metavar="S", help="seed of the sampling (default: random, printed)")
    grammar = parser.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", metavar="FILE", help="write JSON of the schema in this file (needs headstart[grammar])")
    grammar.add_argument("--regex", metavar="PATTERN", help="write text that this regular expression matches as a whole")


def add_style(parser: argparse.ArgumentParser) -> None:
    """How prompts become tokens."""
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_const", const=True, help="use the chat template (default if there is one)")
    style.add_argument("--raw", dest="chat", action="store_const", const=False, help="continue the prompt as it is")
    add_template_arguments(parser)


def add_template_arguments(parser: argparse.ArgumentParser) -> None:
    """The argument of every command that makes prompts from conversations."""
    about = "set a variable of the chat template, as enable_thinking=false; may be repeated (default: those of the heads' recipe)"
    parser.add_argument("--template-arg", action="append", metavar="KEY=VALUE", help=about)


class _DebugHead(argparse.Action):
    """Sets ``--nodes`` and ``--capture``: an adaptive tree may leave the heads out, and what is captured no longer runs their Python."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        namespace.nodes, namespace.capture = 12, "off"


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Arguments of every command that decodes."""
    about = f"draft with n-gram proposers too: {', '.join(PROPOSERS)}; or none (generate, chat with heads on a CPU: suffix)"
    parser.add_argument("--propose", action="extend", nargs="+", choices=(*PROPOSERS, NO_PROPOSERS), metavar="NAME", help=about)
    parser.add_argument("--draft-model", metavar="MODEL", help="draft with this smaller model of the same vocabulary too")
    parser.add_argument("--early-exit", type=count(1), metavar="E", help="draft with the backbone's first E layers too")
    about = "limit the heads' KV cache to the last N positions and a few sink tokens (default: unlimited)"
    parser.add_argument("--draft-window", type=count(1), metavar="N", help=about)
    parser.add_argument("--num-sink-tokens", type=count(0), metavar="N", help="sink tokens kept beside --draft-window (4)")
    parser.add_argument("--offload-draft-kv", action="store_true", help="keep the heads' KV cache in host memory between drafts")
    add_model(parser)
    about = "an image that the prompt (bench: every prompt) is about: a local file or data: URL; may be repeated (needs headstart[images])"
    parser.add_argument("--image", action="append", metavar="FILE", help=about)
    parser.add_argument("--max-new-tokens", type=count(1), default=128, metavar="N", help="most tokens to generate (128)")
    about = "size of the candidate tree, root (bonus token) included; SGLang's num_draft_tokens (default: adaptive)"
    parser.add_argument("--nodes", type=NODES, metavar="N", help=about)
    parser.add_argument("--width", type=WIDTH, metavar="W", help="beam width: nodes expanded per draft level; SGLang's eagle_topk (8)")
    about = "draft length, past the trained depth too; num_speculative_tokens in vLLM, num_steps in SGLang (default: the heads' own)"
    parser.add_argument("--depth", type=DEPTH, metavar="K", help=about)
    about = "for breakpoints and prints in a head: trees of 12 nodes in every step, and nothing captured (--nodes 12 --capture off)"
    parser.add_argument("--debug-head", action=_DebugHead, nargs=0, help=about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON too")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The backbone and how its passes run."""
    parser.add_argument("--backbone", metavar="PATH", help="folder, GGUF file, hub id or 'embedded' (default: that of the heads)")
    add_loading(parser)
    auto = "on a CPU by the layers that `headstart compile` compiled, else by traces; off elsewhere"
    about = f"how forward passes run without Python's overhead (auto: {auto}; compile: also compile what is not yet)"
    parser.add_argument("--capture", choices=("auto", "trace", "cuda-graph", "compile", "off"), default="auto", help=about)


def add_no_compile(parser: argparse.ArgumentParser) -> None:
    """Whether a command that decodes for long compiles first."""
    about = "on a CPU, use what `headstart compile` compiled earlier, if anything; do not compile before beginning"
    parser.add_argument("--no-compile", action="store_true", help=about)


def add_loading(parser: argparse.ArgumentParser) -> None:
    """How the backbone is loaded."""
    parser.add_argument("--head-module", metavar="MODULE", help="import this module first: it has the code of heads of your own")
    about = "PEFT adapter to put on the backbone: folder or hub id (default: the one that the heads were trained with, if any)"
    parser.add_argument("--adapter", metavar="DIR", help=about)
    parser.add_argument("--allow-finetuned", action="store_true", help="allow a fine-tune of the backbone the heads were trained on")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's repository; read it first")
    add_precision(parser)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """The backbone's precision and the threads that compute in it."""
    about = "of the backbone (auto: as saved; on a CPU bf16 only if it has instructions for it; int8, int4: by optimum-quanto)"
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16", "int8", "int4"), default="auto", help=about)
    parser.add_argument("--threads", type=THREADS, metavar="N", help="CPU threads (default: torch's choice)")
