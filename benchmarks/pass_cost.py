"""Compares the cost of a pass, by tree size and context, eager and captured, with that of a token of transformers' generate.

    python benchmarks/pass_cost.py [--backbone embedded] [--contexts 256 1024] [--kinds eagle3 mlp] [--captures trace compile]
                                   [--threads 1] [--profile] [--json FILE]

Prints JSON: for each context and batch size, median milliseconds of a pass over N nodes and of drafting with untrained heads of each kind,
uncaptured and captured; milliseconds of one token of transformers' own generate; and the tau at which a tree breaks even with it. With
``--profile``, instead: where the time of captured passes over 1, 12 and 24 nodes goes, and what packed weights change (in turns, least of
many; times of the thread's own CPU with one thread, so that only ratios are affected by other programs).
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from program import options, run

from headstart.heads.backbone.backbone import Backbone, load_backbone
from headstart.heads.methods import build_drafter
from headstart.inference.bench.tune import TunePlan, tune
from headstart.inference.capture.capture import Capturer
from headstart.inference.capture.packed import fits_in_memory
from headstart.inference.capture.trace import Trace
from headstart.inference.engine.reader import Reader
from headstart.inference.engine.tree import CandidateTree
from headstart.inference.generate import SpeculativeModel

TOKENS, REPEATS = 24, 5
CAPTURES = {"off": "uncaptured", "trace": "traced", "compile": "compiled"}
PROFILED_NODES, TURNS, PROFILED = (1, 12, 16, 24), 30, 10
PARTS = {
    "products": ("linear", "aten::mm", "addmm", "bmm", "matmul", "aten::t"),
    "attention": ("scaled_dot_product", "softmax", "index_copy", "scatter"),
    "views": ("view", "reshape", "transpose", "slice", "select", "expand", "split", "squeeze", "narrow", "chunk", "as_strided", "permute"),
    "interpreter": ("pass",),
}
"""Kinds of operations by parts of their names, the first that fits; the rest is element-wise work, norms and copies."""


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


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of captured passes by nodes, with each form of linear layers, and the share of each part of the work."""
    backbone, found = load_backbone(args.backbone), {}
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    forms = {"as chosen": fits_in_memory(backbone.model), "without packed weights": False}
    passes = {name: captured_passes(backbone, packed, args.contexts[0]) for name, packed in forms.items()}
    least = {(name, nodes): math.inf for name in forms for nodes in PROFILED_NODES}
    for _ in range(TURNS):
        for name, nodes in least:
            start = clock()
            passes[name](nodes)
            least[name, nodes] = min(least[name, nodes], clock() - start)
    for name, packed in forms.items():
        plain = least[name, 1]
        rows = [{"nodes": n, "ms": 1e3 * least[name, n], "plain_steps": least[name, n] / plain} for n in PROFILED_NODES]
        found[name] = {"packed": packed, "passes": rows}
    shares = {nodes: shares_of(lambda nodes=nodes: passes["as chosen"](nodes)) for nodes in PROFILED_NODES}   # type: ignore[misc]
    return {"backbone": backbone.name, "threads": args.threads, "context": args.contexts[0], "forms": found, "shares": shares}


def captured_passes(backbone: Backbone, packed: bool, context: int) -> Callable[[int], object]:
    """A function that makes a captured pass over that many nodes after ``context`` tokens."""
    capturer = Capturer("trace", backbone.device)
    reader = Reader(backbone, (), capturer)
    assert isinstance(reader.read.backend, Trace)
    reader.read.backend.packed = packed
    tokens_BT = torch.randint(backbone.vocab, (1, context), generator=torch.Generator().manual_seed(0))
    _, cache = reader.prompts(tokens_BT, torch.tensor([context]))
    trees = {nodes: CandidateTree([list(range(nodes))], [[max(0, (node - 1) // 2) for node in range(nodes)]]) for nodes in PROFILED_NODES}
    for tree in [*trees.values()] * 2:
        reader.tree(cache, tree)
    return lambda nodes: reader.tree(cache, trees[nodes])[1].argmax(-1).tolist()


def shares_of(one_pass: Callable[[], object]) -> dict[str, float]:
    """The share of each of `PARTS` in the operations' own CPU time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED):
            one_pass()
    totals: dict[str, float] = {}
    for event in profiler.key_averages():
        part = next((part for part, names in PARTS.items() if any(name in event.key for name in names)), "element-wise, norms, copies")
        totals[part] = totals.get(part, 0.0) + event.self_cpu_time_total
    return {part: round(seconds / sum(totals.values()), 3) for part, seconds in sorted(totals.items(), key=lambda one: -one[1])}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.profile:
        with torch.no_grad():
            return profile(args)
    backbone = load_backbone(args.backbone)
    if backbone.max_positions is not None and max(args.contexts) + max(args.nodes) > backbone.max_positions:
        backbone.max_positions = None   # rotary positions extrapolate; the cost of a pass does not depend on its output
    plan = TunePlan(tuple(args.batch_size), tuple(args.contexts), tuple(args.nodes), args.repeats)
    rows: list[dict[str, Any]] = [
        {"context": context, "rows": rows, "transformers_token_ms": token_ms(backbone, context, rows)}
        for context in plan.contexts
        for rows in plan.rows
    ]
    for kind in args.kinds:
        drafter = build_drafter(kind, backbone, {"depth": args.depth}).to(backbone.device, backbone.dtype).eval().requires_grad_(False)
        for capture, name in ((one, CAPTURES[one]) for one in args.captures):
            tuned = tune(SpeculativeModel(backbone, drafter, capture=capture), [], plan)   # type: ignore[arg-type]
            for row, found in zip(rows, tuned.details["by_context"], strict=True):
                draft = found["drafting_ms"][0]
                drafting = dict(draft)[drafter.depth]
                even = [[n, (ms + drafting) / row["transformers_token_ms"]] for n, ms in found["pass_ms"]]
                row.setdefault(kind, {})[name] = {"pass_ms": found["pass_ms"], "drafting_ms": draft, "break_even_tau": even}
    return {"backbone": backbone.name, "threads": args.threads, "device": backbone.device.type, "measured": rows}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1])
    parser.add_argument("--kinds", nargs="+", default=["eagle3"], metavar="KIND", help="of heads: eagle3, mlp, block, ... (eagle3)")
    parser.add_argument("--captures", nargs="+", choices=CAPTURES, default=["off", "trace"], help="backends (off trace)")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="where the time of a captured pass goes")
    run(parser, measure)
