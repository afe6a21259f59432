"""The table of benchmarks/transfer.py: settings by backbones, and how near each setting comes to the best found on every backbone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from transfer_cells import BACKBONES

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    """Return Markdown: a part for each number of training tokens, kind of text (as it stands, the backbone's own) and temperature."""
    groups: dict[tuple[int, bool], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (-row["tokens"], _own_text(row))):
        groups.setdefault((row["tokens"], _own_text(row)), []).append(row)
    parts = []
    for (budget, own), group in groups.items():
        title = f"{budget:,} tokens{' of own text' if own else ''}"
        sampled = [row for row in group if "tau_sampled" in row]
        parts += [_part(group, f"{title}, T=0", "tau"), _part(sampled, f"{title}, T=1", "tau_sampled")]
    return "\n\n".join(filter(None, parts))


def _own_text(row: Row) -> bool:
    return "own" in row["setting"].split("+")


def _part(rows: Sequence[Row], title: str, key: str) -> str:
    if not rows:
        return ""
    measured = dict.fromkeys(row["backbone"] for row in rows)
    backbones = sorted(measured, key=lambda name: list(BACKBONES).index(name) if name in BACKBONES else len(BACKBONES))
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    taus = {(setting, one): _mean(rows, setting, one, key) for setting in settings for one in backbones}
    best = {one: max(tau for (_, name), tau in taus.items() if name == one and tau is not None) for one in backbones}
    lines = [f"| {title} | {' | '.join(backbones)} | least | mean |", "|---" * (len(backbones) + 3) + "|"]
    for setting in settings:
        own = {one: tau for one in backbones if (tau := taus[setting, one]) is not None}
        shares = [tau / best[one] for one, tau in own.items()]
        cells = [("**{:.3f}**" if own[one] == best[one] else "{:.3f}").format(own[one]) if one in own else "" for one in backbones]
        lines.append(f"| {setting} | {' | '.join(cells)} | {min(shares):.3f} | {statistics.mean(shares):.3f} |")
    return "\n".join(lines)


def _mean(rows: Sequence[Row], setting: str, backbone: str, key: str) -> float | None:
    taus = [row[key] for row in rows if row["setting"] == setting and row["backbone"] == backbone]
    return statistics.mean(taus) if taus else None
