"""What the subcommands of inference take on the command line. Imports no library, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

GENERATE_EXAMPLE = """examples:
  headstart generate --heads out/eagle3 "def fibonacci(n):"
  headstart generate --heads out/eagle3 --temperature 0.7 --seed 1 --file question.txt --json answer.json
  headstart generate --backbone Qwen/Qwen3-0.6B --no-draft "Why is the sky blue?" """
CHAT_EXAMPLE = """examples:
  headstart chat --heads out/eagle3
  headstart chat --backbone Qwen/Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7

while it runs: /reset begins anew, /exit or the end of the input leaves, /help lists these; Ctrl-C stops an answer"""
BENCH_EXAMPLE = """examples:
  headstart bench --heads out/eagle3 --heads out/medusa --prompts prompts.jsonl --temperature 0 1 --json report.json
  headstart bench --heads out/eagle3 --prompts spec_bench/question.jsonl --per-task 10 --prompt-lookup --html report.html
  headstart bench --heads out/eagle3 --prompts HumanEval.jsonl gsm8k/test.jsonl --batch-size 1 2 4 8 --limit 64
  headstart bench --backbone Qwen/Qwen3-0.6B --propose suffix recycling --prompts articles.jsonl --prompt-lookup"""


TUNE_EXAMPLE = """examples:
  headstart tune --heads out/eagle3 --prompts prompts.jsonl
  headstart tune --backbone Qwen/Qwen3-0.6B --batch-size 1 8 --contexts 512 4096"""
PROPOSERS = ("suffix", "recycling", "history")


def add_generate(parser: argparse.ArgumentParser) -> None:
    """One prompt continued."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to continue or answer (default: read the standard input)")
    parser.add_argument("--file", metavar="F", help="read the prompt from this file")
    parser.add_argument("--echo", action="store_true", help="write the prompt too")
    parser.add_argument("--stop", action="append", metavar="STRING", help="stop once this is written; may be repeated")
    _add_style(parser)
    _add_one_text(parser)
    _add_shared(parser)


def add_chat(parser: argparse.ArgumentParser) -> None:
    """A conversation; there is a chat template or none of this works, so no style to choose."""
    parser.add_argument("--system", metavar="TEXT", help="what the backbone is told before the first question")
    _add_one_text(parser)
    _add_shared(parser)


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Heads measured."""
    parser.add_argument("--heads", action="extend", nargs="+", metavar="DIR", help="heads to measure: folders or hub ids")
    sets = "Spec-Bench, MT-bench, HumanEval, GSM8K or your own (.jsonl, .jsonl.gz, .txt)"
    parser.add_argument("--prompts", action="extend", nargs="+", required=True, metavar="FILE", help=sets)
    parser.add_argument("--limit", type=count(1), metavar="N", help="the first N prompts of each file only")
    parser.add_argument("--per-task", type=count(1), metavar="N", help="the first N prompts of each task only")
    parser.add_argument("--skip-long", action="store_true", help="leave out prompts that do not fit the context (default: refuse them)")
    parser.add_argument("--prompt-tokens", type=count(1), default=64, metavar="N", help="how much of a plain text is the prompt (64)")
    parser.add_argument("--temperature", type=number(0), action="extend", nargs="+", metavar="T", help="may be many; 0: greedy (default)")
    parser.add_argument(
        "--batch-size", type=count(1), action="extend", nargs="+", metavar="N", help="texts decoded together; may be many (1)"
    )
    parser.add_argument("--seed", type=count(0), default=0, metavar="S", help="seed of the first prompt (0)")
    parser.add_argument("--sampled-nodes", type=count(1), metavar="N", help="--nodes above temperature 0 (default: the same)")
    parser.add_argument("--sampled-width", type=count(1), metavar="W", help="--width above temperature 0 (default: the same)")
    beside = "measure heads also alone, in trees of a fixed size (--nodes, --width and so on are then of these)"
    parser.add_argument("--also-fixed-tree", action="store_true", help=beside)
    parser.add_argument("--prompt-lookup", action="store_true", help="measure transformers' prompt lookup decoding too")
    parser.add_argument("--assistant", metavar="MODEL", help="measure transformers' assisted decoding with this draft model too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots there, one page without links")
    _add_style(parser)
    _add_shared(parser)


def add_tune(parser: argparse.ArgumentParser) -> None:
    """This machine measured."""
    parser.add_argument("--heads", metavar="DIR", help="the heads to tune for (default: proposers that need none)")
    sets = "prompts to learn from what drafts are worth: as for bench (default: measure times only)"
    parser.add_argument("--prompts", action="extend", nargs="+", metavar="FILE", help=sets)
    parser.add_argument("--limit", type=count(1), default=16, metavar="N", help="the first N prompts of each file only (16)")
    parser.add_argument("--prompt-tokens", type=count(1), default=64, metavar="N", help="how much of a plain text is the prompt (64)")
    parser.add_argument("--batch-size", type=count(1), action="extend", nargs="+", metavar="N", help="rows decoded together (1 4)")
    parser.add_argument("--contexts", type=count(1), action="extend", nargs="+", metavar="T", help="tokens before the tree (256 1024)")
    parser.add_argument("--max-nodes", type=count(2), default=256, metavar="N", help="nodes of the largest tree measured (256)")
    _add_style(parser)
    _add_proposers(parser)
    _add_limits(parser)
    _add_model(parser)
    parser.add_argument("--max-new-tokens", type=count(2), default=64, metavar="N", help="how much to write after each prompt (64)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured there too")


def _add_one_text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", metavar="DIR", help="heads to draft with: a folder or a hub id (default: autoregressive decoding)")
    parser.add_argument("--no-draft", action="store_true", help="autoregressive decoding: the same text for the same seed")
    parser.add_argument("--temperature", type=number(0), default=0.0, metavar="T", help="0 is greedy (default)")
    parser.add_argument("--top-k", type=count(0), default=0, metavar="K", help="sample from the K likeliest tokens (0: from all)")
    parser.add_argument("--top-p", type=number(0, 1, above=True), default=1.0, metavar="P", help="sample from the likeliest, of chance P")
    parser.add_argument("--seed", type=count(0), metavar="S", help="seed of the sampling (default: drawn, and told)")


def _add_style(parser: argparse.ArgumentParser) -> None:
    style = parser.add_mutually_exclusive_group()
    style.add_argument("--chat", action="store_const", const=True, help="use the chat template (default if there is one)")
    style.add_argument("--raw", dest="chat", action="store_const", const=False, help="continue the prompt as it is")


def _add_proposers(parser: argparse.ArgumentParser) -> None:
    about = f"draft from the text itself too: any of {', '.join(PROPOSERS)}"
    parser.add_argument("--propose", action="extend", nargs="+", choices=PROPOSERS, metavar="NAME", help=about)
    parser.add_argument("--draft-model", metavar="MODEL", help="draft with this smaller model of the same vocabulary too")
    parser.add_argument("--early-exit", type=count(1), metavar="E", help="draft with the backbone's first E layers too")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    about = "let the heads look at the last N positions alone, and at the first few: bounds their memory (default: at all)"
    parser.add_argument("--draft-window", type=count(1), metavar="N", help=about)
    parser.add_argument("--draft-sink", type=count(0), default=4, metavar="N", help="how many first positions are seen beside a window (4)")
    parser.add_argument("--draft-offload", action="store_true", help="keep the heads' keys and values in host memory between drafts")


def _add_shared(parser: argparse.ArgumentParser) -> None:
    _add_proposers(parser)
    _add_limits(parser)
    _add_model(parser)
    parser.add_argument("--max-new-tokens", type=count(1), default=128, metavar="N", help="how much to write (128)")
    parser.add_argument("--nodes", type=count(1), metavar="N", help="size of a candidate tree, its root included (default: what pays)")
    parser.add_argument("--width", type=count(1), metavar="W", help="how many nodes of a depth are followed (8)")
    parser.add_argument("--depth", type=count(1), metavar="K", help="how many tokens ahead (default: all that the heads draft)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backbone", metavar="PATH", help="folder, hub id or 'embedded' (default: what the heads were trained on)")
    parser.add_argument("--allow-finetuned", action="store_true", help="allow a fine-tune of the backbone the heads were trained on")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code from the model's repository; read it first")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16", "fp16", "int8", "int4"), default="auto",
                        help="of the backbone (auto: fp32 on the CPU; int8, int4: its linear layers' weights, with optimum-quanto)")
    parser.add_argument("--threads", type=count(1), metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--capture", choices=("auto", "trace", "cuda-graph", "compile", "off"), default="auto",
                        help="how forward passes are captured to run without Python's overhead (auto: trace on a CPU, off elsewhere)")


def count(least: int) -> Callable[[str], int]:
    """Reads a whole number of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number of at least {least} is needed; got {text!r}")
        return int(text)

    return read


def number(least: float, most: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """Reads a number from ``least`` (``above``: greater than it) to ``most``."""

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
