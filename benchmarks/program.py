"""The common command line of the benchmarks: threads, and an output file for the JSON."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def options(about: str | None) -> argparse.ArgumentParser:
    """A parser described by the first line of a docstring."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; small models are fastest with one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is printed there as well")
    return parser


def decoding_options(about: str | None, max_new_tokens: int) -> argparse.ArgumentParser:
    """The same, with heads and the prompts to decode with them."""
    parser = options(about)
    parser.add_argument("--heads", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=40, help="prompts at most")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    return parser


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Any]) -> None:
    """Measure and print the results as JSON, or as they are if they are text."""
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = measure(given)
    report = found if isinstance(found, str) else json.dumps(found, indent=2)
    print(report)
    if given.json is not None:
        given.json.write_text(report + "\n")
