"""Counts the logits that decoding with drafts and autoregressive decoding compute otherwise, bit for bit, over many prompts.

    python benchmarks/same_bits.py --heads embedded --prompts recipes/quickstart/prompts.jsonl [--dtype bf16] [--capture compile]
    python benchmarks/same_bits.py --backbone MODEL --prompts ROWS.jsonl        # drafts of suffix and recycling proposers alone

Prints JSON: for each temperature the prompts, how many texts differ, the positions compared, how many of them
have other logits in any bit, and the largest difference. In bf16 on a CPU there should be none.
"""

import argparse
from typing import Any, get_args

from program import options, run

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.inference.bench.logits import LogitsComparison, continued
from headstart.inference.bench.prompts import Prompter, read_prompts
from headstart.inference.bench.systems import AR, HeadstartSystem
from headstart.inference.capture.capture import BackendName
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.measure import Settings
from headstart.inference.sources.recycling import RecyclingProposer
from headstart.inference.sources.suffix import SuffixProposer


def measure(args: argparse.Namespace) -> dict[str, Any]:
    backbone, tokenizer = load_backbone(args.backbone, dtype=args.dtype), load_tokenizer(args.backbone)
    prompts = [prompt.ids_T for prompt in read_prompts(args.prompts, Prompter(tokenizer, None, args.prompt_tokens), args.limit)]
    proposers = [] if args.heads else [SuffixProposer(), RecyclingProposer()]
    heads = load(args.heads, backbone, proposers=proposers, capture=args.capture)
    ar, drafting = HeadstartSystem(AR, SpeculativeModel(backbone, capture=args.capture)), HeadstartSystem("drafts", heads)
    rows = []
    for temperature in args.temperature:
        settings, found = Settings(args.max_new_tokens, temperature, tree=TreeShape(args.nodes, args.width)), LogitsComparison()
        differing = 0
        for i, prompt_T in enumerate(prompts):
            differing += found.add_texts(*(continued(one, {i: prompt_T}, settings, 0) for one in (drafting, ar)))
        rows.append({"temperature": temperature, "prompts": len(prompts), "texts_differing": differing, **vars(found)})
    given = {name: getattr(args, name) for name in ("backbone", "heads", "dtype", "capture", "nodes", "width", "threads")}
    return {**given, "rows": rows}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--heads", metavar="DIR", help="none: drafts of proposers")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=200, help="prompts at most")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--capture", choices=get_args(BackendName), default="auto")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    run(parser, measure)
