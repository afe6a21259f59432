"""Measures memory and time of EAGLE-3's training by sequence length, compared with attention that holds whole score matrices.

    python benchmarks/training_length.py [--lengths 2048 8192 32768] [--depth 3] [--width 32] [--document 512] [--json FILE]

Runs only forward and backward of a tiny random head, on one row of each length, as one document and packed with documents of
``--document`` tokens. ``blocks`` is the attention used in training, ``checkpointing`` the same with ``train.gradient_checkpointing``, and
``whole`` holds all scores of a pass at once, where they fit ``--limit`` GB. Memory is the peak of the bytes allocated by the step, counted
as in objective_memory.py. Time is measured separately, best of ``--repeats``. Prints JSON.
"""

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import program
import torch
from objective_memory import Live
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.layers import decoder_layer as layers
from headstart.heads.layers.causal_attention import Blocks, attend_past
from headstart.heads.methods import build_drafter


def attend_whole(query_BHTC: Tensor, keys_BGSC: Tensor, values_BGSC: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """The result of `attend_past`, computed by its formula."""
    B, H, T, C = query_BHTC.shape
    keys, values = (x.repeat_interleave(H // x.shape[1], 1)[:, :, :T] for x in (keys_BGSC, values_BGSC))
    barred = blocks.barred(0, T, 0, query_BHTC.device)[:, 0]
    scores = ((query_BHTC @ keys.mT) * C**-0.5).masked_fill(barred, -math.inf)
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


WAYS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"blocks": attend_past, "checkpointing": attend_past, "whole": attend_whole}


def make(args: argparse.Namespace) -> Drafter:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=args.width, intermediate_size=2 * args.width, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=max(args.lengths),
    )  # fmt: skip
    return build_drafter("eagle3", Backbone(LlamaForCausalLM(config).eval().requires_grad_(False)), {"depth": args.depth})


def made_up(drafter: Drafter, length: int, document: int) -> Features:
    """Random features, in documents of that length."""
    tokens_BT, D = torch.randint(0, 256, (1, length)), drafter.backbone.dim
    taps = {tap: torch.randn(1, length, D) for tap in drafter.taps}
    return Features(tokens_BT, torch.randn(1, length, D), taps, document_BT=torch.arange(length)[None] // document)


def step(drafter: Drafter, features: Features) -> float:
    """Run forward and backward; the gradients are dropped."""
    total = torch.stack([hidden.square().mean() for hidden in drafter(features)]).sum()
    total.backward()
    drafter.zero_grad()
    return total.item()


def measure(way: str, drafter: Drafter, features: Features, repeats: int) -> dict[str, Any]:
    layers.attend_past = WAYS[way]
    drafter.recomputing = way == "checkpointing"
    gc.collect()
    with Live() as live:
        total = step(drafter, features)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step(drafter, features)
        seconds.append(time.perf_counter() - start)
    tokens = features.tokens_BT.numel()
    return {"mb": round(live.most / 1e6, 1), "us_per_token": round(min(seconds) / tokens * 1e6, 1), "total": round(total, 5)}


def main(args: argparse.Namespace) -> dict[str, Any]:
    drafter, rows = make(args), []
    for length in args.lengths:
        whole_gb = 4 * 2 * length**2 * 3 * args.depth / 1e9   # 2 heads, fp32, 3 matrices a pass: scores, weights, a temporary
        for kind, document in (("one document", length), (f"documents of {args.document}", args.document)):
            features = made_up(drafter, length, document)
            ways = [way for way in WAYS if way != "whole" or whole_gb <= args.limit]
            row = {"positions": length, "text": kind} | {way: measure(way, drafter, features, args.repeats) for way in ways}
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    asked = {name: getattr(args, name) for name in ("depth", "width", "document", "threads", "repeats", "limit")}
    return {"torch": torch.__version__, "dtype": "float32", "heads": 2, "key_heads": 1, **asked, "rows": rows}


if __name__ == "__main__":
    parser = program.options(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--document", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--limit", type=float, default=8.0, help="gigabytes that whole scores may take")
    program.run(parser, main)
