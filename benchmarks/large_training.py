"""Measures a training step on an accelerator: EAGLE-3 of depth 6 on an 8B Llama-shaped backbone with random weights, live features.

    python benchmarks/large_training.py [--backbone PATH] [--rows 1 2] [--chunk-size 1024 4096] [--json FILE]

With ``--backbone`` that model is trained on; otherwise, without CUDA, a tiny one.

Prints JSON for each number of rows and `objective.chunk_size`: tokens per second, milliseconds of the parts of a step (features: the
backbone's forward pass; drafter: its forward pass; objective: readouts, divergence and its gradient; backward: the drafter's; optimizer),
the objective's time relative to the same matrix products alone, and the peak memory; or that it is out of memory.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from large_model import build, device_name
from program import options, run
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.training.data.batches import Batch
from headstart.training.features.source import LiveFeatures
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import count_label_tokens
from headstart.training.objective.objective import objective
from headstart.training.recipe.training import Objective, Train
from headstart.training.run.optimizer import build_optimizer

WARM = 2
"""Steps before the measured ones."""


def timed(into: list[float], work: Callable[[], Any]) -> Any:
    """Do the work and add its seconds, those of the device included."""
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    into.append(time.perf_counter() - start)
    return result


def random_batch(rows: int, length: int, backbone: Backbone) -> Batch:
    """Rows of random tokens, all of them labels."""
    tokens_BT = torch.randint(backbone.vocab, (rows, length), device=backbone.device)
    labels_BT, document_BT = torch.ones_like(tokens_BT, dtype=torch.bool), torch.zeros_like(tokens_BT)
    return Batch(tokens_BT, labels_BT, document_BT, tuple((row,) for row in range(rows)))


def products(drafter: Drafter, rows: int) -> Callable[[], None]:
    """The objective's matrix products alone: the teacher's readout and, at every depth, the drafter's with both of its gradients."""
    backbone, dtype = drafter.backbone, drafter.backbone.dtype
    hidden_MD = torch.randn(rows, backbone.dim, device=backbone.device)
    weight_VD = torch.randn(drafter.backbone.vocab // 4, backbone.dim, device=backbone.device)

    def multiply() -> None:
        with torch.autocast(backbone.device.type, torch.bfloat16, enabled=backbone.device.type == "cuda"):
            backbone.readout(hidden_MD.to(dtype))
            for _ in range(drafter.trained_depth):
                logits_MV: Tensor = hidden_MD @ weight_VD.T
                _, _ = logits_MV @ weight_VD, logits_MV.T @ hidden_MD

    return multiply


def measure_rows(rows: int, settings: Objective, args: argparse.Namespace) -> dict[str, Any]:
    """Some training steps with that many rows."""
    (backbone, drafter), length, steps = build(args.backbone), args.length, args.steps
    drafter = drafter.to(backbone.device, torch.float32).train()
    with torch.no_grad():
        drafter.init_from(backbone)
    train, source = Train(steps=steps, lr=1e-3), LiveFeatures(backbone, drafter.taps)
    optimizer = build_optimizer(drafter, train)
    spent: dict[str, list[float]] = {part: [] for part in ("features", "drafter", "objective", "backward", "optimizer", "products")}
    on_gpu = backbone.device.type == "cuda"
    for _ in range(steps + WARM):
        batch = random_batch(rows, length, backbone)
        labels = count_label_tokens(batch.loss_mask_BT, batch.document_BT)
        with torch.autocast(backbone.device.type, torch.bfloat16, enabled=on_gpu):
            features = timed(spent["features"], partial(source.read, batch))
            hidden = timed(spent["drafter"], partial(drafter, features))
            loss = FusedLoss(settings, drafter, args.compile)
            sums = timed(spent["objective"], partial(objective, loss, features, hidden))
        timed(spent["backward"], (sums.loss / labels).backward)
        timed(spent["optimizer"], optimizer.step)
        optimizer.zero_grad()
        with torch.no_grad():
            timed(spent["products"], products(drafter, rows * length))
    middle = {part: 1e3 * statistics.median(times[WARM:]) for part, times in spent.items()}
    alone = middle.pop("products")
    return {
        "tokens_per_second": 1e3 * rows * length / sum(middle.values()),
        "milliseconds": {part: round(ms, 1) for part, ms in middle.items()},
        "objective_over_matrix_products": middle["objective"] / alone,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    args.length, found = args.length or (2048 if torch.cuda.is_available() else 64), []
    for rows, chunk_size in itertools.product(args.rows, args.chunk_size):
        sizes = {"rows": rows, "chunk_size": chunk_size}
        try:
            found.append(sizes | measure_rows(rows, Objective(chunk_size=chunk_size), args))
        except torch.OutOfMemoryError:
            found.append(sizes | {"out_of_memory": True})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return {"device": device_name(), "backbone": args.backbone, "length": args.length, "measured": found}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--backbone", metavar="PATH", help="train on this model instead")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2], help="sequences of a step (1 2)")
    parser.add_argument("--chunk-size", type=int, nargs="+", default=[1024, 4096], help="positions whose logits are held (1024 4096)")
    parser.add_argument("--length", type=int, help="tokens of a sequence (2048; 64 without CUDA)")
    parser.add_argument("--compile", action="store_true", help="as train.compile")
    parser.add_argument("--steps", type=int, default=5, help="measured steps (5)")
    run(parser, measure)
