"""The results of benchmarks/heads.py: means over seeds, a Markdown table and a chart."""

from __future__ import annotations

import math
import statistics
from html import escape
from typing import Any

from headstart.support.report.charts import above, short, ticks

Row = dict[str, Any]
GROUP = ("backbone", "budget", "amount", "settings")
"""Keys of runs that may be compared."""
COLUMNS = {
    "parameters": "parameters",
    "training tokens/s": "tokens_per_second",
    "tau chain, T=0": "tau_chain_0",
    "T=1": "tau_chain_1",
    "tau tree, T=0": "tau_tree_0",
    "T=1 ": "tau_tree_1",
    "drafting ms, chain": "draft_ms_chain_0",
    "speed, T=0": "speedup_adaptive_0",
    "T=1  ": "speedup_adaptive_1",
}
"""Titles of the table -> fields of a run."""
WIDTH, LINE, LEFT, RIGHT, TOP, BOTTOM = 720, 22, 170, 24, 34, 40
STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif; } text { fill: #5d6670; } .name { fill: #1d2126; } .title { font-weight: 600; }
.grid { stroke: #eceef0; } .h0 { stroke: #2563c9; fill: #2563c9; } .h1 { stroke: #d06a00; fill: #d06a00; }
@media (prefers-color-scheme: dark) { svg { background: #1b1f24; } text { fill: #9aa4af; } .name { fill: #e6e9ec; }
.grid { stroke: #272c32; } .h0 { stroke: #6fa8ff; fill: #6fa8ff; } .h1 { stroke: #ffa94d; fill: #ffa94d; } }
"""


def summary(runs: list[Row], speeds: list[Row], timings: list[Row]) -> list[Row]:
    """For each group and entry the mean and standard error over seeds of every number, ``[mean, None]`` of a single run."""
    found: dict[str, Row] = {}
    for run in runs:
        name = {key: run[key] for key in (*GROUP, "entry")}
        if str(name) in found:
            continue
        same = _matching(runs, name)
        apart = [*_matching(speeds, {key: name[key] for key in ("backbone", "settings", "entry")}), *_matching(timings, name)]
        found[str(name)] = {**name, "seeds": [one["seed"] for one in same], **_means(same), **_means(apart)}
    return list(found.values())


def _matching(rows: list[Row], name: Row) -> list[Row]:
    return [row for row in rows if {**row, **name} == row]


def _means(rows: list[Row]) -> Row:
    """Of every number that the rows have."""
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, int | float))
    return {key: _mean([row[key] for row in rows if key in row]) for key in keys if key not in (*GROUP, "seed")}


def _mean(values: list[float]) -> list[float | None]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return [statistics.mean(values), error]


def groups(entries: list[Row]) -> dict[str, list[Row]]:
    """The entries of each table by its title (the settings that not all tables have at its end), the longest drafts in a chain first."""
    found: dict[str, list[Row]] = {}
    for entry in entries:
        amount = f"{entry['amount']:,.0f} training {entry['budget']}"
        alike = [{*map(str, other["settings"])} for other in entries if all(other[key] == entry[key] for key in GROUP[:3])]
        changes = [str(setting) for setting in entry["settings"] if str(setting) not in set.intersection(*alike)]
        title = ", ".join((entry["backbone"], amount, *changes))
        found.setdefault(title, []).append(entry)
    return {title: sorted(own, key=lambda entry: -entry["tau_chain_0"][0]) for title, own in found.items()}


def table(entries: list[Row]) -> str:
    """A Markdown table for each group; tau includes the backbone's own token, speed is relative to autoregressive decoding."""
    parts = []
    for title, own in groups(entries).items():
        columns = {name: field for name, field in COLUMNS.items() if any(field in entry for entry in own)}
        lines = [f"**{title}**", "", f"| head | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
        for entry in own:
            deep = "" if entry["chain"][0] == 5 else f" (chain of {entry['chain'][0]:.0f})"
            lines.append(f"| {entry['entry']}{deep} | {' | '.join(_cell(field, entry.get(field)) for field in columns.values())} |")
        counts = sorted({len(entry["seeds"]) for entry in own})
        single = " (one where no error is given)" if 1 in counts[:-1] else ""
        lines += ["", f"Means and standard errors over {' or '.join(map(str, counts))} seed{'' if counts == [1] else 's'}{single}."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(field: str, value: list[float | None] | None) -> str:
    if value is None:
        return ""
    mean, error = value
    assert mean is not None
    if field == "parameters":
        return f"{mean / 1e6:.2f} M"
    digits = 0 if field == "tokens_per_second" else 2
    return f"{mean:,.{digits}f}" + ("" if error is None else f" ± {error:,.{digits}f}")


def plot(entries: list[Row]) -> str:
    """An SVG of tau in a chain, at both temperatures, with standard errors: a panel for each group."""
    panels, height = [], 0
    for title, own in groups(entries).items():
        panels.append(f'<g transform="translate(0 {height})">{_panel(title, own)}</g>')
        height += TOP + LINE * len(own) + BOTTOM
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg {box} role="img"><style>{STYLE}</style>{"".join(panels)}</svg>\n'


def _panel(title: str, own: list[Row]) -> str:
    series = (("T=0", "tau_chain_0", "h0"), ("T=1", "tau_chain_1", "h1"))
    most = above([entry[field][0] + (entry[field][1] or 0) for entry in own for _, field, _ in series])
    bottom = TOP + LINE * len(own)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - 1) / (most - 1)

    parts = [f'<text class="title" x="12" y="18">{escape(title)}: tokens per forward pass (tau), chain</text>']
    for mark in (mark for mark in ticks(most) if mark >= 1):
        parts.append(f'<line class="grid" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP - 8}" y2="{bottom}"/>')
        parts.append(f'<text x="{x(mark):.1f}" y="{bottom + 16}" text-anchor="middle">{short(mark)}</text>')
    for i, (label, _, css) in enumerate(series):
        parts.append(f'<g class="{css}"><circle cx="{LEFT + 70 * i}" cy="{bottom + 28}" r="4"/></g>')
        parts.append(f'<text x="{LEFT + 70 * i + 9}" y="{bottom + 32}">{label}</text>')
    for i, entry in enumerate(own):
        y = TOP + LINE * i + LINE / 2
        parts.append(f'<text class="name" x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{escape(entry["entry"])}</text>')
        for _, field, css in series:
            mean, error = entry[field]
            whisker = "" if error is None else f'<line x1="{x(mean - error):.1f}" x2="{x(mean + error):.1f}" y1="{y}" y2="{y}"/>'
            note = f"<title>{mean:.3f}{'' if error is None else f' ± {error:.3f}'}</title>"
            parts.append(f'<g class="{css}" stroke-width="2">{whisker}<circle cx="{x(mean):.1f}" cy="{y}" r="4">{note}</circle></g>')
    return "".join(parts)
