"""The results of benchmarks/heads.py: means over seeds, a Markdown table and a chart."""

import io
import math
import statistics
from typing import Any

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
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = groups(entries)
    with rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(7.2, 1.0 + sum(0.9 + 0.3 * len(own) for own in found.values())), layout="constrained")
        panels = figure.subplots(len(found), 1, squeeze=False, height_ratios=[3 + len(own) for own in found.values()])[:, 0]
        for panel, (title, own) in zip(panels, found.items(), strict=True):
            names = [entry["entry"] for entry in own]
            for label, field in (("T=0", "tau_chain_0"), ("T=1", "tau_chain_1")):
                means, errors = zip(*((entry[field][0], entry[field][1] or 0.0) for entry in own), strict=True)
                panel.errorbar(means, names, xerr=errors, fmt="o", label=label)
            panel.set(title=f"{title}: tokens per forward pass (tau), chain", xlim=(1, None))
            panel.invert_yaxis()
            panel.legend()
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", bbox_inches="tight")
    return drawn.getvalue()
