"""What does a backbone pass cost as the tree grows, against plain decoding and against drafting?

    python benchmarks/pass_cost.py [--backbone embedded] [--context 128] [--threads 1] [--json FILE]

Prints JSON: median milliseconds of a pass over N nodes, of drafting a tree of that size with untrained EAGLE-3 heads, of one
token of transformers' own generate; and the tau at which a tree of N nodes breaks even with it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headstart.heads.backbone import Backbone, load_backbone
from headstart.heads.base import build_drafter
from headstart.inference.cache import RaggedCache
from headstart.inference.tree import CandidateTree, Ranking, TreeShape, grow

REPEATS = 30


def median_ms(work: Callable[[], object]) -> float:
    """Of `REPEATS` runs after three to warm up."""
    times = []
    for i in range(REPEATS + 3):
        start = time.perf_counter()
        work()
        times += [time.perf_counter() - start] if i >= 3 else []
    return 1e3 * statistics.median(times)


def verify_ms(backbone: Backbone, text_BT: torch.Tensor, tree: CandidateTree) -> float:
    """One pass over the tree behind a prompt, with its readout."""
    cache = RaggedCache(backbone.num_layers, 1, text_BT.device)
    backbone.read(text_BT, cache, cache.expect(text_BT.shape[1]))
    cache.extend(torch.tensor([text_BT.shape[1]], device=text_BT.device), text_BT.shape[1])

    def work() -> None:
        cache.expect(tree.tokens_BN.shape[1])
        positions_BN = cache.lengths_B[:, None] + tree.depths_BN
        see = cache.see(tree, positions_BN, backbone.windows)
        backbone.readout(backbone.read(tree.tokens_BN, cache, positions_BN, see).hidden_BTD)

    return median_ms(work)


@torch.no_grad()
def measure(args: argparse.Namespace) -> dict:
    torch.set_num_threads(args.threads)
    backbone = load_backbone(args.backbone)
    drafter = build_drafter("eagle3", backbone, {"depth": args.depth}).to(backbone.device, backbone.dtype).eval()
    text_BT = torch.randint(0, backbone.vocab, (1, args.context), device=backbone.device)
    state = drafter.begin(backbone.read(text_BT, taps=drafter.taps))
    greedy = {"do_sample": False, "max_new_tokens": 32, "min_new_tokens": 32, "pad_token_id": 0}
    token = median_ms(lambda: backbone.model.generate(text_BT, attention_mask=torch.ones_like(text_BT), **greedy)) / 32
    rows = []
    for nodes in args.nodes:
        shape = TreeShape(nodes, args.width)
        tree = grow(drafter, state, text_BT[:, -1], shape, Ranking())
        drafting = median_ms(lambda shape=shape: grow(drafter, state, text_BT[:, -1], shape, Ranking()))
        verifying = verify_ms(backbone, text_BT, tree)
        rows.append({"nodes": nodes, "draft_ms": drafting, "verify_ms": verifying, "break_even_tau": (drafting + verifying) / token})
    return {"backbone": backbone.name, "threads": args.threads, "context": args.context, "transformers_token_ms": token, "rows": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default="embedded")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 12, 16, 24, 32, 48])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = json.dumps(measure(arguments), indent=2)
    print(report)
    if arguments.json:
        arguments.json.write_text(report + "\n")
