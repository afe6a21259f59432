"""Compares adaptive trees to autoregressive decoding, with useless and with trained heads, and to trees of fixed sizes.

    python benchmarks/never_slower.py [--backbone embedded] [--prompts recipes/quickstart/prompts.jsonl] [--batch-size 1 8 32]
    python benchmarks/never_slower.py --heads embedded embedded-mlp --nodes 8 12 [--batch-size 1 8]

Prints JSON: for each batch size and temperature, the speed of heads with random weights, of proposers and of both relative to
autoregressive decoding in the same process, alternating batch by batch, which should not be below 1; with ``--heads``, instead, that of
trained heads in adaptive trees, alone and with proposers, and in fixed ones of width 4; and whether every token was identical. ``first``
is the speed in the first round, in which functions are captured and costs are measured.
"""

import argparse
import gc
import time
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from program import options, run
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.heads.base import Drafter
from headstart.heads.methods import build_drafter
from headstart.inference.bench.prompts import Prompter, read_prompts
from headstart.inference.engine.tree import TreeShape, TreeSize
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.measure import Settings, continue_texts
from headstart.inference.sources.recycling import RecyclingProposer
from headstart.inference.sources.suffix import SuffixProposer

WIDTH = 4
"""Beam width of fixed trees."""


def random_heads(backbone: Backbone) -> Drafter:
    """An EAGLE-3 drafter with random weights."""
    torch.manual_seed(0)
    drafter = build_drafter("eagle3", backbone, {"depth": 4, "draft_vocab_size": backbone.vocab // 2})
    for weight in drafter.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    return drafter.to(backbone.device, backbone.dtype).eval().requires_grad_(False)


@dataclass
class System:
    """A model with its sources, and the size of its trees."""

    model: SpeculativeModel
    tree: TreeSize = "auto"


def untrained(backbone: Backbone, drafter: Drafter) -> dict[str, System]:
    """Sources that bring nothing or, on text that repeats itself, a lot."""
    return {
        "random heads": System(SpeculativeModel(backbone, drafter)),
        "proposers": System(SpeculativeModel(backbone, proposers=[SuffixProposer(), RecyclingProposer()])),
        "both": System(SpeculativeModel(backbone, drafter, proposers=[SuffixProposer(), RecyclingProposer()])),
    }


def trained(backbone: Backbone, heads: list[str], nodes: list[int]) -> dict[str, System]:
    """Trained heads, each in adaptive trees, alone and with proposers, and in trees of every fixed size."""
    systems = {}
    for name in heads:
        systems[name] = System(load(name, backbone))
        systems[f"{name} and proposers"] = System(load(name, backbone, proposers=[SuffixProposer(), RecyclingProposer()]))
        systems |= {f"{name}, {size} nodes": System(load(name, backbone), TreeShape(size, WIDTH)) for size in nodes}
    return systems


def measure(args: argparse.Namespace) -> dict[str, Any]:
    backbone, tokenizer = load_backbone(args.backbone, dtype=args.dtype), load_tokenizer(args.backbone)
    prompts = [prompt.ids_T for prompt in read_prompts(args.prompts, Prompter(tokenizer, None, 64), args.limit)]
    drafter, rows = random_heads(backbone), []
    for size in args.batch_size:
        for temperature in args.temperature:
            others = trained(backbone, args.heads, args.nodes) if args.heads else untrained(backbone, drafter)
            settings = Settings(args.max_new_tokens, temperature)
            found = alternate({"ar": System(SpeculativeModel(backbone)), **others}, prompts, size, settings, args.rounds)
            rows.append({"batch": size, "temperature": temperature, **found})
    asked = {name: getattr(args, name) for name in ("backbone", "dtype", "threads", "rounds", "max_new_tokens")}
    return {**asked, "prompts": len(prompts), "rows": rows}


def alternate(systems: dict[str, System], prompts: list[Tensor], size: int, settings: Settings, rounds: int) -> dict[str, Any]:
    """Speed relative to autoregressive decoding, by the best time of each batch, since other programs can only make it slower.

    The best time excludes captures and trials in the first round, which cost each system about a second once.
    """
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in systems}
    texts: dict[str, list[Any]] = {name: [] for name in systems}
    gc.freeze()   # as the commands that decode do
    for turn in range(rounds * len(batches)):
        number, names = turn % len(batches), list(systems)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            system, start = systems[name], time.perf_counter()
            seeds = list(range(len(batches[number])))
            out = continue_texts(system.model, batches[number], replace(settings, tree=system.tree), seeds)
            seconds[name][number].append(time.perf_counter() - start)
            texts[name].append(out.sequences.tolist())
    best, first = ({name: sum(map(of, found)) for name, found in seconds.items()} for of in (min, itemgetter(0)))
    ratios = {name: {"x_ar": best["ar"] / best[name], "first": first["ar"] / first[name]} for name in systems if name != "ar"}
    return {"systems": ratios, "identical": all(found == texts["ar"] for found in texts.values())}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--heads", nargs="+", default=[], help="trained heads: compare these")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 12, 16], help="sizes of fixed trees")
    parser.add_argument("--prompts", default="recipes/quickstart/prompts.jsonl")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3, help="how often each batch is decoded; the best time of each system counts")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    run(parser, measure)
