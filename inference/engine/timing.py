"""Where the time of a decoding step goes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pass:
    """One decoding step: tokens written to each sequence (0: it has ended, or waits), nodes of a row's tree, seconds by part."""

    written: list[int]
    nodes: int
    draft: float
    verify: float
    host: float


class Clock:
    """Seconds between laps. On an accelerator ``exact`` waits for it at each lap, which costs speed."""

    def __init__(self, device: torch.device, exact: bool) -> None:
        self.synchronize = torch.accelerator.synchronize if exact and device.type != "cpu" else None
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        if self.synchronize is not None:
            self.synchronize()
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return seconds
