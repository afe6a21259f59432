"""Compares the memory and time of the objective with those of the same loss computed from whole logits.

    python benchmarks/objective_memory.py [--positions 8192] [--vocab 131072] [--depth 7] [--width 64] [--chunk 1024] [--json FILE]

Memory is counted, not sampled: a dispatch mode intercepts every operation, forward and backward, adds the bytes of each new storage
and subtracts them when it is freed. Storages that existed before (weights, hidden states) do not count; gradients do. Time is measured
separately, in alternating runs, best of ``--repeats``.

The naive form implements the formula with autograd and keeps the whole logits of the backbone and of every depth. Its memory grows with
positions x vocabulary, so it is measured only where it fits ``--limit`` GB; for larger sizes it is computed as a number of fp32 buffers
``[positions, vocabulary]``, the number counted at the largest size that fits. On a CPU the fused form processes fewer rows at a time than
``--chunk`` allows; ``--whole-chunks`` makes it process that many, as on an accelerator. Prints JSON.
"""

import argparse
import gc
import json
import sys
import time
import weakref
from typing import Any

import torch
from program import options, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.layers.chunking import ChunkPolicy, use_chunk_policy
from headstart.heads.methods import build_drafter
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.objective import objective
from headstart.training.recipe.recipe import Objective


class Live(TorchDispatchMode):
    """Counts the bytes of storages allocated inside the mode and not yet freed (``now``), and their peak (``most``)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.known | before:
                    self.known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def naive(wanted: Objective, backbone: Backbone, drafter: Drafter, features: Features, hidden: list[Tensor]) -> Tensor:
    """Forward KL over whole distributions, with one document per row and loss on every token."""
    with torch.no_grad():
        p_BTV = backbone.readout(features.hidden_BTD[:, 1:-1]).softmax(-1)
        negentropy_BT = -torch.special.entr(p_BTV).sum(-1)
    losses = []
    for k, draft_BTD in enumerate(hidden):
        log_q_BTV = drafter.readout(draft_BTD, k, features.tokens_BT[:, k + 1 : -1]).log_softmax(-1)
        cross_BT = -(p_BTV[:, k:] * log_q_BTV).sum(-1)
        losses.append(wanted.depth_decay**k * (cross_BT + negentropy_BT[:, k:]).sum())
    return torch.stack(losses).sum()


def in_chunks(wanted: Objective, backbone: Backbone, drafter: Drafter, features: Features, hidden: list[Tensor]) -> Tensor:
    return objective(FusedLoss(wanted, backbone, drafter), features, hidden).loss


class Case:
    """One size: a random backbone, EAGLE-3's readout, and hidden states that require a gradient."""

    def __init__(self, positions: int, vocab: int, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=args.width, intermediate_size=args.width, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=64,
        )  # fmt: skip
        self.backbone = Backbone(LlamaForCausalLM(config).eval().requires_grad_(False))
        self.drafter = build_drafter("eagle3", self.backbone, {"depth": args.depth})
        tokens_BT = torch.randint(0, vocab, (1, positions))
        document_BT = torch.zeros_like(tokens_BT)
        self.features = Features(tokens_BT, torch.randn(1, positions, args.width), None, document_BT == 0, document_BT)
        self.hidden = [torch.randn(1, positions - 2 - k, args.width).requires_grad_() for k in range(args.depth)]
        self.wanted = Objective(chunk_size=args.chunk)

    def step(self, way: Any) -> float:
        """Compute the loss and its gradients; the gradients are dropped."""
        loss = way(self.wanted, self.backbone, self.drafter, self.features, self.hidden)
        loss.backward()
        self.drafter.zero_grad()
        for hidden in self.hidden:
            hidden.grad = None
        return loss.item()

    def peak(self, way: Any) -> tuple[int, float]:
        gc.collect()
        with Live() as live:
            loss = self.step(way)
        return live.most, loss


def measure(positions: int, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table: seconds of both forms where both run, else of the fused form's counted run."""
    case, buffer = Case(positions, vocab, args), 4 * positions * vocab
    fits = (args.depth + 5) * buffer <= args.limit * 1e9
    ways = {"fused": in_chunks, "naive": naive} if fits else {"fused": in_chunks}
    row: dict[str, Any] = {"positions": positions, "vocab": vocab, "buffer_mb": round(buffer / 1e6, 1)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():
        start = time.perf_counter()
        most, row[f"{name}_loss"] = case.peak(way)
        seconds[name] += [] if fits else [time.perf_counter() - start]
        row[f"{name}_mb"], row[f"{name}_buffers"] = round(most / 1e6, 1), round(most / buffer, 3)
    for _ in range(args.repeats if fits else 0):
        for name, way in ways.items():
            start = time.perf_counter()
            case.step(way)
            seconds[name].append(time.perf_counter() - start)
    row |= {f"{name}_seconds": round(min(found), 3) for name, found in seconds.items()}
    if fits:
        row["memory"] = round(row["fused_mb"] / row["naive_mb"], 4)
        row["time"] = round(row["fused_seconds"] / row["naive_seconds"], 3)
    return row


def main(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for positions, vocab in [*(map(int, size.split("x")) for size in args.also), (args.positions, args.vocab)]:
        with use_chunk_policy(ChunkPolicy("cuda" if args.whole_chunks else None)):   # on "cuda", chunks are not cut to fit a CPU's caches
            rows.append(measure(positions, vocab, args))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    counted = [row["naive_buffers"] for row in rows if "naive_buffers" in row]
    if "naive_mb" not in rows[-1] and counted:
        rows[-1]["naive_mb_computed"] = round(counted[-1] * rows[-1]["buffer_mb"], 1)
        rows[-1]["memory"] = round(rows[-1]["fused_mb"] / rows[-1]["naive_mb_computed"], 4)
    asked = {name: getattr(args, name) for name in ("depth", "width", "chunk", "rows", "threads", "repeats")}
    return {"torch": torch.__version__, "dtype": "float32", **asked, "sizes": rows}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--also", nargs="*", default=["512x16384", "1024x32768", "2048x65536"], metavar="POSITIONSxVOCAB")
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--whole-chunks", action="store_true", help="take whole chunks on a CPU too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=8.0, help="gigabytes the naive form may take")
    run(parser, main)
