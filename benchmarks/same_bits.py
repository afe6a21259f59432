"""Counts the logits that decoding with drafts and autoregressive decoding compute otherwise, bit for bit, over many prompts.

    python benchmarks/same_bits.py --heads embedded --prompts recipes/quickstart/prompts.jsonl [--capture compile]
    python benchmarks/same_bits.py --model MODEL --heads DIR --prompts ROWS.jsonl ... --per-task 6 --max-new-tokens 96 \\
        --dtype bf16 fp32 --capture auto off --batch-size 1 4 --threads 2

Prints JSON: for each dtype, capture, batch size and temperature, for drafts of the heads and of n-grams (suffix and recycling proposers),
the prompts, how many texts differ, the positions compared, how many of them have other logits in any bit, and the largest difference. On a
CPU there should be none. Each batch is reported to stderr when it is done.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from program import options, run
from torch import Tensor

from headstart.chat.prompts import Prompter, read_prompts
from headstart.heads.backbone.backbone import Backbone, load_backbone, load_tokenizer
from headstart.inference.bench.judging import LogitsComparison, continued
from headstart.inference.bench.systems import AR, HeadstartSystem
from headstart.inference.capture.capture import BackendName
from headstart.inference.engine.recycling import RecyclingProposer
from headstart.inference.engine.suffix import SuffixProposer
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.measure import Settings

HEADS, N_GRAMS = "heads", "n-grams"


def drafting(args: argparse.Namespace, backbone: Backbone, drafts: str, capture: BackendName) -> SpeculativeModel:
    if drafts == HEADS:
        return load(args.heads, backbone=backbone, capture=capture, allow_finetuned=args.allow_finetuned)
    return SpeculativeModel(backbone, proposers=[SuffixProposer(), RecyclingProposer()], capture=capture)


def rows(args: argparse.Namespace, dtype: str, prompts: Sequence[Tensor]) -> Iterator[dict[str, Any]]:
    """A row for each setting of one dtype; autoregressive decoding and drafts go on with what they have captured."""
    backbone = load_backbone(args.model, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    for capture in args.capture:
        ar = HeadstartSystem(AR, SpeculativeModel(backbone, capture=capture))
        systems = {drafts: HeadstartSystem(drafts, drafting(args, backbone, drafts, capture)) for drafts in args.drafts}
        for batch, temperature in itertools.product(args.batch_size, args.temperature):
            settings = Settings(args.max_new_tokens, temperature, tree=TreeShape(args.nodes, args.width))
            found, differing = {drafts: LogitsComparison() for drafts in systems}, dict.fromkeys(systems, 0)
            of = {"dtype": dtype, "capture": capture, "batch": batch, "temperature": temperature}
            for first in range(0, len(prompts), batch):
                group = dict(list(enumerate(prompts))[first : first + batch])
                expected = continued(ar, group, settings, 0)
                for drafts, system in systems.items():
                    differing[drafts] += found[drafts].add_texts(continued(system, group, settings, 0), expected)
                counts = {drafts: one.differing for drafts, one in found.items()}
                print(f"{of}: {first + len(group)} of {len(prompts)} prompts, {differing}, {counts}", file=sys.stderr, flush=True)
            for drafts, one in found.items():
                yield {**of, "drafts": drafts, "prompts": len(prompts), "texts_differing": differing[drafts], **vars(one)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    prompter = Prompter(load_tokenizer(args.model), None, args.prompt_tokens)
    read = [read_prompts(file, prompter, args.limit, args.per_task) for file in args.prompts]
    prompts = [prompt.ids_T for some in itertools.zip_longest(*read) for prompt in some if prompt is not None]
    args.drafts = args.drafts or [HEADS, N_GRAMS][not args.heads :]
    given = {name: getattr(args, name) for name in ("model", "heads", "nodes", "width", "max_new_tokens", "threads")}
    return {**given, "rows": [row for dtype in args.dtype for row in rows(args, dtype, prompts)]}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--heads", metavar="DIR")
    parser.add_argument("--allow-finetuned", action="store_true", help="heads of a model with other weights")
    parser.add_argument("--drafts", nargs="+", choices=(HEADS, N_GRAMS), help="default: both, without --heads n-grams")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, help="rows of a file at most")
    parser.add_argument("--per-task", type=int, help="prompts of a task at most")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--capture", nargs="+", choices=get_args(BackendName), default=["auto"])
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16", "fp16"), default=["bf16"])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    run(parser, measure)
