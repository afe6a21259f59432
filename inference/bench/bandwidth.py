"""Memory bandwidth: the limit of decoding few sequences at a time.

Every forward pass of the backbone reads every weight once. Passes times bytes over seconds is therefore a rate that memory bounds;
divided by the bandwidth measured here it is the MBU (memory bandwidth utilisation, as in gpt-fast). Near 1, only fewer passes (a
higher tau) decode faster; far below, time goes elsewhere. Weights that fit into the caches are read faster than memory allows, so
the MBU of a small model may exceed 1.
"""

from __future__ import annotations

import time

import torch

from headstart.heads.backbone.backbone import Backbone
from headstart.inference.bench.timing import synchronize
from headstart.inference.capture.stopwatch import Stopwatch

BUFFER = 256 << 20
"""Bytes; larger than the caches."""
SECONDS = 0.3


def weight_bytes(backbone: Backbone) -> int:
    """Bytes of weights that a forward pass reads: all, except an untied input embedding, of which single rows are read.

    A mixture of experts reads fewer; this counts all.
    """
    tied = backbone.embed.weight is backbone.unembed.weight
    total = sum(weight.numel() * weight.element_size() for weight in backbone.model.parameters())
    return total - (0 if tied else backbone.embed.weight.numel() * backbone.embed.weight.element_size())


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second read from the device's memory: the best of summing a large buffer repeatedly."""
    buffer = torch.ones(BUFFER // 4, device=device)
    best, end = 0.0, time.perf_counter() + SECONDS
    while best == 0.0 or time.perf_counter() < end:
        synchronize(device)
        with Stopwatch() as watch:
            buffer.sum()
            synchronize(device)
        best = max(best, BUFFER / watch.seconds)
    return best
