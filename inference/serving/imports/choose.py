"""Which reading of a folder fits: the one whose drafts the backbone accepts most often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import Drafter
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.measure import measure_tau
from headstart.inference.serving.imports.reading import Reading
from headstart.support.terminal import watched

CHAIN = 5
"""Most tokens of the chains that are measured."""


@dataclass(frozen=True)
class Measured:
    """A reading, its drafter, and what it accepted."""

    reading: Reading
    drafter: Drafter
    figures: dict[str, Any]

    @property
    def tau(self) -> float:
        return float(self.figures["tau"])


def measure(readings: Sequence[tuple[Reading, Drafter]], prompts: Sequence[Tensor], new_tokens: int) -> list[Measured]:
    """Decode the prompts greedily with each reading's drafter, in chains; the best comes first, and of equal ones the first."""
    found = []
    for reading, drafter in readings:
        depth = min(CHAIN, drafter.max_depth or CHAIN)
        with torch.no_grad():
            figures = measure_tau(
                SpeculativeModel(drafter.backbone, drafter, capture="off"), watched(prompts, "measuring the heads", "prompt"),
                max_new_tokens=new_tokens, tree=TreeShape(depth + 1, 1, depth),
            )
        rates = figures["acceptance_per_depth"][:depth]
        found.append(Measured(reading, drafter, {**figures, "acceptance_per_depth": rates}))
    return sorted(found, key=lambda one: -one.tau)


def verdict(measured: Sequence[Measured]) -> list[str]:
    """Say which reading was taken and how the others did, a line each; the figures alone for a single one."""
    first, *others = measured
    rates = " ".join(f"{rate:.3f}" for rate in first.figures["acceptance_per_depth"])
    lines = [f"tau {first.tau:.3f} in {first.figures['passes']} passes, acceptance per depth {rates}"]
    if others:
        lines.append(f"read as: {first.reading.choice}")
        lines += [f"  otherwise tau {one.tau:.3f}: {one.reading.choice}" for one in others]
        if first.tau - others[0].tau < 0.02 * first.tau:
            lines.append("the figures are too close to tell the readings apart: give more prompts with --prompts FILE, or force --counting")
    return lines
