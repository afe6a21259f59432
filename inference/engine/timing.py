"""Timing of the parts of a decoding step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from headstart.inference.engine.tree import VerifiedTree


@dataclass(frozen=True)
class Pass:
    """One decoding step: the number of tokens written to each sequence decoded in it, nodes of a row's tree, seconds by part.

    Sequences are given by their numbers."""

    written: dict[int, int]
    nodes: int
    draft: float
    verify: float
    host: float
    kept: dict[int, int] = field(default_factory=dict)
    """Drafts of each sequence that the backbone's picks confirmed, those past its end included; none given in beam search."""
    drafted: dict[int, int] = field(default_factory=dict)
    """Tokens drafted for each sequence; none given in beam search."""
    trees: dict[int, VerifiedTree] = field(default_factory=dict)
    """The verified tree of each sequence, by its number; empty in beam search and where only the sequences are asked for."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole pass."""
        return self.draft + self.verify + self.host


class Clock:
    """Measures the seconds between laps. On an accelerator, ``exact`` synchronizes at each lap, which costs speed."""

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
