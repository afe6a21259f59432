"""Compares the cost of a pass, by tree size and context, eager and captured, with that of a token of transformers' generate.

    python benchmarks/pass_cost.py [--backbone embedded] [--contexts 256 1024] [--threads 1] [--json FILE]

Prints JSON: for each context and batch size, median milliseconds of a pass over N nodes and of drafting with untrained EAGLE-3 heads,
eager and captured; milliseconds of one token of transformers' own generate; and the tau at which a tree breaks even with it.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from program import options, run

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.methods import build_drafter
from headstart.inference.bench.tune import TunePlan, tune
from headstart.inference.generate import SpeculativeModel

TOKENS, REPEATS = 24, 5


def token_ms(backbone: Backbone, context: int, rows: int) -> float:
    """Milliseconds per token of transformers' greedy generate after a prompt of that length, without the prefill."""
    ids_BT = torch.randint(backbone.vocab, (rows, context), device=backbone.device)
    times: dict[int, list[float]] = {1: [], 1 + TOKENS: []}
    for _ in range(REPEATS + 1):
        for count, found in times.items():
            start = time.perf_counter()
            backbone.model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
            )
            found.append(time.perf_counter() - start)
    first, all_of_them = (statistics.median(found[1:]) for found in times.values())
    return 1e3 * (all_of_them - first) / TOKENS


def measure(args: argparse.Namespace) -> dict[str, Any]:
    backbone = load_backbone(args.backbone)
    drafter = build_drafter("eagle3", backbone, {"depth": args.depth}).to(backbone.device, backbone.dtype).eval().requires_grad_(False)
    if backbone.max_positions is not None and max(args.contexts) + max(args.nodes) > backbone.max_positions:
        backbone.max_positions = None   # rotary positions extrapolate; the cost of a pass does not depend on its output
    plan = TunePlan(tuple(args.batch_size), tuple(args.contexts), tuple(args.nodes), args.repeats)
    rows = [
        {"context": context, "rows": rows, "transformers_token_ms": token_ms(backbone, context, rows)}
        for context in plan.contexts
        for rows in plan.rows
    ]
    for name, capture in (("uncaptured", "off"), ("traced", "trace")):
        tuned = tune(SpeculativeModel(backbone, drafter, capture=capture), [], plan)   # type: ignore[arg-type]
        for row, found in zip(rows, tuned.details["by_context"], strict=True):
            draft = found["drafting_ms"][0]
            drafting = draft["begin"] + sum(draft["depths"])
            even = [[n, (ms + drafting) / row["transformers_token_ms"]] for n, ms in found["pass_ms"]]
            row[name] = {"pass_ms": found["pass_ms"], "drafting_ms": draft, "break_even_tau": even}
    return {"backbone": backbone.name, "threads": args.threads, "device": backbone.device.type, "measured": rows}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=7)
    run(parser, measure)
