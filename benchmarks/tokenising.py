"""Measures how long conversations take to become tokens, in one process and in several, and how long a second start takes.

    python benchmarks/tokenising.py [--backbone embedded] [--data quickstart:train.jsonl.gz] [--rows 25000] [--processes 1 2]

The rows of the file, a plain text as a conversation of four turns, are repeated, each time with other words, up to ``--rows``. Prints
JSON: for each number of processes the seconds and the CPU seconds of a first start (reading, tokenising, checking, keeping) and of a second
one, and conversations a CPU second. On a version without `data.processes` the same is measured once. Nothing is left in the user's cache
folder.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from program import options, run

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.training.data.data import Splits, load_data
from headstart.training.data.rows import read_rows
from headstart.training.recipe.recipe import Data

CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""For a tokenizer without a chat template."""


def repeated(source: str, count: int, folder: Path) -> Path:
    """Write a file of ``count`` rows."""
    rows, file = read_rows(source), folder / "rows.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for i in range(count):
            row = rows[i % len(rows)]
            turns = row.get("messages") or _talk(row["text"])
            first = turns[0] | {"content": f"{turns[0]['content']} ({i // len(rows)})"}
            out.write(json.dumps({"messages": [first, *turns[1:]]}) + "\n")
    return file


def _talk(text: str) -> list[dict[str, str]]:
    """Return a conversation of two questions and answers that a plain text is cut into."""
    size = len(text) // 4
    return [{"role": ("user", "assistant")[i % 2], "content": text[i * size : (i + 1) * size]} for i in range(4)]


def timed(data: Data, tokenizer: Any) -> tuple[dict[str, float], Splits]:
    """Return seconds, CPU seconds of all processes, and the samples."""
    start, cpu = time.perf_counter(), _cpu()
    splits = load_data(data, tokenizer, data.max_length, progress=False)
    return {"seconds": time.perf_counter() - start, "cpu_seconds": _cpu() - cpu}, splits


def _cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer, measured = load_tokenizer(args.backbone), []
    with tempfile.TemporaryDirectory() as folder:
        file = repeated(args.data, args.rows, Path(folder))
        several = [{"processes": count} for count in args.processes] if "processes" in Data.model_fields else [{}]
        for number, settings in enumerate(several * args.repeats):
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache-{number}"
            template = None if tokenizer.chat_template else CHATML
            data = Data.model_validate({"train": str(file), "max_length": 4096, "chat_template": template} | settings)
            first, splits = timed(data, tokenizer)
            second, _ = timed(data, tokenizer)
            rate = args.rows / first["cpu_seconds"]
            measured.append({**settings, "first": first, "second": second, "rows_per_cpu_second": rate, "said": str(splits.stats)})
    return {"backbone": args.backbone, "data": args.data, "rows": args.rows, "cpus": len(os.sched_getaffinity(0)), "measured": measured}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--backbone", default="embedded", help="whose tokenizer and chat template are used")
    parser.add_argument("--data", default="quickstart:train.jsonl.gz")
    parser.add_argument("--rows", type=int, default=25_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=1)
    run(parser, measure)
