"""How fast weights are read: the limit of decoding few texts at a time.

Every backbone pass reads every weight once. Passes times bytes, by seconds, is therefore a rate that the machine's memory bounds:
near the bound, only fewer passes (a higher tau) make decoding faster; far below it, time goes elsewhere. Weights that fit into
the caches can be read faster than memory allows, so the share of a small model may exceed 1.
"""

from __future__ import annotations

import time

import torch

from headstart.heads.backbone.backbone import Backbone

BUFFER = 256 << 20
"""Bytes; caches are smaller."""
SECONDS = 0.3


def weight_bytes(backbone: Backbone) -> int:
    """Bytes of weights that a pass reads: all of them, except an input embedding of its own (of which only rows are read).

    In a mixture of experts a pass reads fewer; this counts all.
    """
    tied = backbone.embed.weight is backbone.unembed.weight
    every = sum(weight.numel() * weight.element_size() for weight in backbone.model.parameters())
    return every - (0 if tied else backbone.embed.weight.numel() * backbone.embed.weight.element_size())


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second that this machine reads from the memory of ``device``: the best of summing a large buffer again and again."""
    buffer = torch.ones(BUFFER // 4, device=device)
    best, end = 0.0, time.perf_counter() + SECONDS
    while best == 0.0 or time.perf_counter() < end:
        start = now(device)
        buffer.sum()
        best = max(best, BUFFER / (now(device) - start))
    return best


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
