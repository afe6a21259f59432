"""The table of benchmarks/transfer.py: settings by backbones, and how near each setting comes to the best found on every backbone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from transfer_cells import BACKBONES

Row = dict[str, Any]
VERIFICATION, DEPTH_COSTS = 1.1, (0.05, 0.1)
"""Cost of verifying a chain, and of drafting one depth, in plain decoding steps: ratios as on a GPU."""


def table(rows: Sequence[Row]) -> str:
    """Return Markdown: a part for each number of training tokens."""
    budgets = sorted({row["tokens"] for row in rows}, reverse=True)
    return "\n\n".join(_part([row for row in rows if row["tokens"] == budget], budget) for budget in budgets)


def _part(rows: Sequence[Row], budget: int) -> str:
    measured = dict.fromkeys(row["backbone"] for row in rows)
    backbones = sorted(measured, key=lambda name: list(BACKBONES).index(name) if name in BACKBONES else len(BACKBONES))
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    taus = {(setting, one): _mean(rows, setting, one) for setting in settings for one in backbones}
    best = {one: max(tau for (_, name), tau in taus.items() if name == one and tau is not None) for one in backbones}
    lines = [f"| {budget:,} tokens | {' | '.join(backbones)} | least | mean |", "|---" * (len(backbones) + 3) + "|"]
    for setting in settings:
        own = {one: tau for one in backbones if (tau := taus[setting, one]) is not None}
        shares = [tau / best[one] for one, tau in own.items()]
        cells = [("**{:.3f}**" if own[one] == best[one] else "{:.3f}").format(own[one]) if one in own else "" for one in backbones]
        lines.append(f"| {setting} | {' | '.join(cells)} | {min(shares):.3f} | {statistics.mean(shares):.3f} |")
    return "\n".join(lines)


def _mean(rows: Sequence[Row], setting: str, backbone: str) -> float | None:
    taus = [row["tau"] for row in rows if row["setting"] == setting and row["backbone"] == backbone]
    return statistics.mean(taus) if taus else None


def speedups(accepted: Sequence[float]) -> dict[float, float]:
    """Return tokens per plain step's time at each cost of a drafted depth, with the best length of the chain."""
    found = {}
    for cost in DEPTH_COSTS:
        lengths = range(len(accepted) + 1)
        found[cost] = max((1 + sum(accepted[:n])) / (VERIFICATION + n * cost) if n else 1.0 for n in lengths)
    return found
