"""How the state that EAGLE heads feed back changes from depth to depth: its size, and how far a depth changes its direction.

    python benchmarks/fed_back_states.py HEADS [HEADS ...] [--backbone embedded] [--prompts recipes/quickstart/prompts.jsonl] [--json FILE]

Prints JSON: for each folder and depth, the root mean square of the state read, and the mean cosine between it and what the layer gives. A
cosine near 1 means that a depth repeats the one before. States are computed as in training, at all positions of the prompts.
"""

import argparse
from typing import Any

import torch
from program import options, run
from torch.nn.functional import cosine_similarity

from headstart.heads.autoregressive import AutoregressiveDrafter
from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.checkpoint import load_drafter
from headstart.inference.bench.prompts import Prompter, read_prompts


@torch.no_grad()
def measure(args: argparse.Namespace) -> dict[str, Any]:
    backbone, tokenizer = load_backbone(args.backbone, dtype="fp32"), load_tokenizer(args.backbone)
    prompts = [prompt.ids_T[None] for prompt in read_prompts(args.prompts, Prompter(tokenizer, None, args.tokens), args.limit)]
    found = {}
    for folder in args.heads:
        drafter = load_drafter(folder, backbone, tokenizer=tokenizer)
        if not isinstance(drafter, AutoregressiveDrafter):
            raise SystemExit(f"{folder} has {type(drafter).__name__} heads; give EAGLE-1 or EAGLE-3 heads")
        sizes, cosines = torch.zeros(drafter.trained_depth), torch.zeros(drafter.trained_depth)
        for ids_1T in prompts:
            features = backbone.read(ids_1T, taps=drafter.taps)
            state_1TD = drafter.states(features)
            for depth, output_1TD in enumerate(drafter.forward_dense(features)):
                read_1TD = state_1TD[:, : output_1TD.shape[1]]
                sizes[depth] += read_1TD.square().mean().sqrt() / len(prompts)
                cosines[depth] += cosine_similarity(read_1TD, output_1TD, dim=-1).mean() / len(prompts)
                state_1TD = drafter.next_state(output_1TD)
        found[folder] = {"size": [round(size, 2) for size in sizes.tolist()], "cosine": [round(cosine, 3) for cosine in cosines.tolist()]}
    return found


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("heads", nargs="+", metavar="HEADS", help="folders of EAGLE heads")
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--prompts", default="recipes/quickstart/prompts.jsonl", metavar="FILE")
    parser.add_argument("--limit", type=int, default=16, help="prompts (16)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each (128)")
    run(parser, measure)
