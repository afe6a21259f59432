"""Memory bandwidth, which limits the speed of decoding with small batches.

Every forward pass of the backbone reads every weight once, so forward passes times weight bytes over seconds is bounded by the memory
bandwidth; their ratio is the MBU (memory bandwidth utilisation, as in gpt-fast). Near 1, only fewer passes (a higher tau) make decoding
faster; well below 1, the time is spent elsewhere. Weights that fit into the CPU caches are read faster than memory allows, so the MBU of
a small model may exceed 1.
"""

from __future__ import annotations

import time

import torch

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.bench.timing import synchronize
from headstart.inference.capture.stopwatch import Stopwatch

BUFFER = 256 << 20
"""Bytes; larger than the CPU caches."""
SECONDS = 0.3


def weight_bytes(backbone: Backbone) -> int:
    """Bytes of weights that a forward pass reads: all but an untied input embedding, of which only single rows are read.

    All experts of a mixture of experts are counted, although a pass reads fewer.
    """
    tied = backbone.embed.weight is backbone.unembed.weight
    total = sum(weight.numel() * weight.element_size() for weight in backbone.model.parameters())
    return total - (0 if tied else backbone.embed.weight.numel() * backbone.embed.weight.element_size())


def memory_bandwidth(device: torch.device) -> float:
    """Read bandwidth of the device's memory in bytes per second: the best of several sums over a large buffer."""
    buffer = torch.ones(BUFFER // 4, device=device)
    best, end = 0.0, time.perf_counter() + SECONDS
    while best == 0.0 or time.perf_counter() < end:
        synchronize(device)
        with Stopwatch() as watch:
            buffer.sum()
            synchronize(device)
        best = max(best, BUFFER / watch.seconds)
    return best
