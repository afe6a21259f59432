"""Compares the prefill of prompts captured and uncaptured, on a CPU.

    python benchmarks/prefill_cost.py [--backbone embedded] [--dtype bf16 fp32] [--rows 1 8] [--lengths 16 64 256] [--threads 2]

Prints JSON: for each dtype, number of rows and length the milliseconds of both (in turns, least of many), and how many numbers of the last
hidden states differ; and how long the captures took.
"""

import argparse
import math
import time
from typing import Any

import torch
from program import options, run

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.inference.capture.capture import Capturer
from headstart.inference.engine.reader import Reader


def seconds(reader: Reader, tokens_BT: torch.Tensor) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    features, _ = reader.prompts(tokens_BT, torch.full((len(tokens_BT),), tokens_BT.shape[1]))
    return time.perf_counter() - start, features.hidden_BTD


@torch.no_grad()
def compare(backbone: Backbone, rows: list[int], lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    readers = {name: Reader(backbone, (), Capturer(name, backbone.device)) for name in ("off", "trace")}   # type: ignore[arg-type]
    found: list[dict[str, Any]] = []
    for count in rows:
        capturing_s = seconds(readers["trace"], torch.randint(backbone.vocab, (count, lengths[0])))[0]
        for length in lengths:
            tokens_BT = torch.randint(backbone.vocab, (count, length), generator=torch.Generator().manual_seed(0))
            hidden = {name: seconds(reader, tokens_BT)[1] for name, reader in readers.items()}
            least = dict.fromkeys(readers, math.inf)
            for _ in range(repeats):
                for name, reader in readers.items():
                    least[name] = min(least[name], seconds(reader, tokens_BT)[0])
            found.append({
                "dtype": str(backbone.dtype).removeprefix("torch."), "rows": count, "length": length, "uncaptured_ms": 1e3 * least["off"],
                "captured_ms": 1e3 * least["trace"], "share": least["trace"] / least["off"], "capturing_s": capturing_s,
                "numbers": hidden["off"].numel(), "differing": int((hidden["off"] != hidden["trace"]).sum()),
            })
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    measured = [
        row for dtype in args.dtype for row in compare(load_backbone(args.backbone, dtype=dtype), args.rows, args.lengths, args.repeats)
    ]
    return {"backbone": args.backbone, "threads": args.threads, "measured": measured}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=15)
    run(parser, measure)
