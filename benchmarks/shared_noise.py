"""Compares the acceptance of drafts ranked with the noise of the sampled picks with that of top-k drafts, when sampling.

    python benchmarks/shared_noise.py --heads out/demo/eagle3 --prompts recipes/quickstart/prompts.jsonl [--temperature 1 0.7]

Prints JSON: tau of the same heads in trees of the same shape, with children ranked by `log q + noise` (as in Headstart) and by `log q`
alone (as in inference engines: top-k children, and a pick sampled independently of them). Both write the same tokens.
"""

import argparse
from typing import Any
from unittest.mock import patch

from program import decoding_options, run

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.checkpoint import read_metadata
from headstart.inference.bench.prompts import Prompter, read_prompts
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.measure import measure_tau
from headstart.inference.sources.draft import DraftScoring


def measure(args: argparse.Namespace) -> dict[str, Any]:
    name = str(read_metadata(args.heads)[1]["backbone"])
    backbone, tokenizer = load_backbone(name, dtype="fp32"), load_tokenizer(name)
    prompts = [prompt.ids_T for prompt in read_prompts(args.prompts, Prompter(tokenizer, None, args.prompt_tokens), args.limit)]
    drafter = load(args.heads, backbone).drafter
    rows = []
    for temperature in args.temperature:
        for nodes, width in ((12, 4), (24, 8)):
            how = {"max_new_tokens": args.max_new_tokens, "temperature": temperature, "tree": TreeShape(nodes, width)}
            shared = measure_tau(SpeculativeModel(backbone, drafter), prompts, **how)
            with patch.object(DraftScoring, "at", lambda self, depths, vocabulary: DraftScoring()):
                apart = measure_tau(SpeculativeModel(backbone, drafter), prompts, **how)
            assert shared["tokens"] == apart["tokens"]
            rows.append({"temperature": temperature, "nodes": nodes, "tau_shared": shared["tau"], "tau_top_k": apart["tau"]})
    return {"heads": args.heads, "prompts": len(prompts), "max_new_tokens": args.max_new_tokens, "rows": rows}


if __name__ == "__main__":
    parser = decoding_options(__doc__, max_new_tokens=80)
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.7])
    run(parser, measure)
