"""A report as one HTML page that needs nothing else: tables, charts, and the text with the passes that wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from headstart.inference.bench.table import cells, name, rows_at, speeds, verdict
from headstart.support.report.charts import Axes, Series, above, histogram, lines
from headstart.support.report.markup import RUNS, document, heat, panels, passes, section, table_row, tabled

Row = dict[str, Any]


def page(report: Row) -> str:
    """The whole page."""
    fine, sentence = verdict(report)
    versions = ", ".join(f"{what} {version}" for what, version in report["versions"].items())
    about = (
        f"{report['dtype']}, {report['device']}, {report['threads']} threads; {report['prompts']} prompts, up to"
        f" {report['max_new_tokens']} tokens each, seed {report['seed']}; {versions}"
    )
    charts = "".join(chart for chart in (_depths(report), _batches(report)) if chart)
    parts = [
        f"<h1>{escape(report['backbone'])}</h1><p class='soft'>{escape(about)}</p>",
        f"<p class='verdict{'' if fine else ' bad'}'>{escape(sentence)}</p>",
        section("Speed", SPEED, _table(report)),
        f"<div class='charts'>{charts}</div>",
        section("Tasks", TASKS, panels(_tasks(report))),
        section("Tree sizes and what they cost", SIZES, panels(_sizes(report))),
        section("What each pass wrote", RUNS, panels(_texts(report))),
    ]
    return document(report["backbone"], parts)


SPEED = (
    "tau: tokens a text gets per pass of the backbone, its own included; 1 is plain decoding. GB/s: weights of the backbone read, and how"
    " much of the rate at which this machine reads its memory that is. Milliseconds are per pass."
)
DEPTHS = "The share of passes in which the draft of a depth was accepted; tau is 1 plus the sum of a line's points."
TASKS = "The same by task. Shaded: the share of passes in which the draft of that depth was accepted."
SIZES = "Bars: how often a tree had so many nodes, its root included (1 is a plain step). Lines: what a pass over so many takes here."


def _settings(report: Row) -> list[tuple[float, int]]:
    return list(dict.fromkeys((row["temperature"], row["batch"]) for row in report["results"]))


def _hues(report: Row) -> dict[str, int]:
    """A colour for each of the heads."""
    return {head: i for i, head in enumerate(dict.fromkeys(row["head"] for row in report["results"]))}


def _first_batch(report: Row) -> list[Row]:
    """The rows of heads at the first batch size."""
    return [row for row in report["results"] if row["batch"] == report["results"][0]["batch"]]


def _table(report: Row) -> str:
    settings = _settings(report)
    batched = any(batch > 1 for _, batch in settings)
    titles = ["temperature", *(["batch"] if batched else []), "", "tau", "tokens/s", "x plain", "x transformers"]
    titles += ["GB/s", "of memory", "draft ms", "verify ms", "host ms", "identical"]
    body = []
    for temperature, batch in settings:
        for i, row in enumerate(rows_at(report, temperature, batch)):
            where = [f"{temperature:g}", *([str(batch)] if batched else [])]
            kind = ("head" if "head" in row else "base") + (" first" if i == 0 else "")
            body.append(table_row(kind, [*where, name(row), *speeds(row), *cells(row)[:-1]], len(where)))
    return tabled(titles, body, len(titles) - 12 + 1)


def _depths(report: Row) -> str:
    """Acceptance by depth, a line for each of the heads and temperatures."""
    rows, hues = _first_batch(report), _hues(report)
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    series = [
        Series(_titled(row, temperatures), list(enumerate(row["acceptance_per_depth"], 1)), hues[row["head"]], row["temperature"] > 0)
        for row in rows
        if row["acceptance_per_depth"]
    ]
    if not series:
        return ""
    deepest = max(len(one.points) for one in series)
    axes = Axes(range(1, deepest + 1), 1.0, "depth", "share of passes")
    return section("Acceptance by depth", DEPTHS, lines(series, axes))


def _titled(row: Row, temperatures: Sequence[float]) -> str:
    return name(row) + (f", temperature {row['temperature']:g}" if len(temperatures) > 1 else "")


def _batches(report: Row) -> str:
    """Tokens a second by batch size, a line for each system, at the first temperature."""
    settings, hues = _settings(report), _hues(report)
    first = settings[0][0]
    batches = sorted(batch for temperature, batch in settings if temperature == first)
    if len(batches) < 2:
        return ""
    found: dict[str, dict[int, float]] = {}
    for batch in batches:
        for row in rows_at(report, first, batch):
            found.setdefault(name(row), {})[batch] = row["tokens_per_second"]
    found = {one: speeds for one, speeds in found.items() if len(speeds) > 1}   # some take one text at a time
    series = [Series(one, sorted(speeds.items()), hues.get(one), one == "transformers") for one, speeds in found.items()]
    top = above([speed for speeds in found.values() for speed in speeds.values()])
    axes = Axes(batches, top, "texts decoded together", "tokens a second, all texts")
    return section("Speed by batch size", f"At temperature {first:g}.", lines(series, axes))


def _tasks(report: Row) -> list[tuple[str, str]]:
    """For each of the heads and settings, a line for each task, and one for all."""
    panels = []
    for row in report["results"]:
        deepest = len(row["acceptance_per_depth"])
        titles = ["task", "prompts", "tau", "tokens/s", "x plain", "x transformers", *map(str, range(1, deepest + 1))]
        every = [(task, report["tasks"][task], one) for task, one in row["tasks"].items()]
        if len(every) > 1:
            every.append(("all", report["prompts"], row))
        body = [_task(title, prompts, one, deepest) for title, prompts, one in every]
        batch = f", batch {row['batch']}" if len({one["batch"] for one in report["results"]}) > 1 else ""
        panels.append((f"{name(row)}, temperature {row['temperature']:g}{batch}", tabled(titles, body, 0)))
    return panels


def _task(title: str, prompts: int, one: Row, deepest: int) -> str:
    shares = [*one["acceptance_per_depth"], *[0.0] * deepest][:deepest]
    cells = "".join(f"<td>{cell}</td>" for cell in (str(prompts), *speeds(one)))
    return f"<tr><td class=l>{escape(title)}</td>{cells}{heat(shares)}</tr>"


def _sizes(report: Row) -> list[tuple[str, str]]:
    """For each of the heads and temperatures at the first batch size."""
    panels = []
    for row in _first_batch(report):
        counts = {int(nodes): passes for nodes, passes in row["tree_sizes"].items()}
        curve = [point for one in report.get("costs", []) if one["head"] == row["head"] for point in one["points"]]
        if not counts:
            continue
        hue = _hues(report)[row["head"]]
        series = [Series("reading, ms", [(p["nodes"], p["verify_ms"]) for p in curve], hue)] if curve else []
        series += [Series("with drafting and the rest, ms", [(p["nodes"], p["pass_ms"]) for p in curve], hue, True)] if curve else []
        widest = max(*counts, *(p["nodes"] for p in curve), 1)
        marks = sorted({1, *(size for size in (4, 8, 16, 24, 32, 48, 64, 96, 128) if size <= widest), widest})
        marks = [mark for mark in marks if mark == widest or widest - mark > widest / 24]
        axes = Axes(marks, above([p["pass_ms"] for p in curve]), "nodes of a row's tree", "milliseconds a pass", even=False)
        panels.append((f"{name(row)}, temperature {row['temperature']:g}", histogram(counts, series, axes)))
    return panels


def _texts(report: Row) -> list[tuple[str, str]]:
    hues = _hues(report)
    return [
        (f"{one['head']}, temperature {one['temperature']:g}, {one['task']}", passes(one, hues[one["head"]]))
        for one in report["samples"]
    ]
