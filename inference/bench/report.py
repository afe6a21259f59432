"""A report as one HTML page that needs nothing else: tables, charts, and the text with the passes that wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from headstart.inference.bench.charts import Axes, Series, above, histogram, lines, strip
from headstart.inference.bench.style import CSS, SCRIPT
from headstart.inference.bench.table import cells, name, rows_at, speeds, verdict

Row = dict[str, Any]
STRONGEST = 8
"""Runs from this length on are painted alike."""


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
        _section("Speed", SPEED, _table(report)),
        f"<div class='charts'>{charts}</div>",
        _section("Tasks", TASKS, _panels(_tasks(report))),
        _section("Tree sizes and what they cost", SIZES, _panels(_sizes(report))),
        _section("What each pass wrote", RUNS, _panels(_texts(report))),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Headstart: {escape(report['backbone'])}</title><style>{CSS}</style></head>\n"
        f"<body>{''.join(parts)}<script>{SCRIPT}</script></body></html>\n"
    )


SPEED = (
    "tau: tokens a text gets per pass of the backbone, its own included; 1 is plain decoding. GB/s: weights of the backbone read, and how"
    " much of the rate at which this machine reads its memory that is. Milliseconds are per pass."
)
DEPTHS = "The share of passes in which the draft of a depth was accepted; tau is 1 plus the sum of a line's points."
TASKS = "The same by task. Shaded: the share of passes in which the draft of that depth was accepted."
SIZES = "Bars: how often a tree had so many nodes, its root included (1 is a plain step). Lines: what a pass over so many takes here."
RUNS = "A stretch of colour is what one pass wrote, the stronger the longer; unmarked tokens came alone. The strip: the passes in order."


def _section(title: str, about: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2><p class='soft'>{escape(about)}</p>{body}</section>" if body else ""


def _panels(panels: Iterable[tuple[str, str]]) -> str:
    """Named panels, of which the page's script shows one at a time; one that has nothing to tell it from others shows no name."""
    found = list(panels)
    inner = "".join(
        f'<div class="panel" data-name="{escape(title)}">{f"<p><b>{escape(title)}</b></p>" if len(found) > 1 else ""}{body}</div>'
        for title, body in found
    )
    return f'<div class="panels">{inner}</div>' if found else ""


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
            body.append(_line(kind, [*where, name(row), *speeds(row), *cells(row)[:-1]], len(where)))
    return _tabled(titles, body, len(titles) - 12 + 1)


def _line(kind: str, cells: Sequence[str], left: int) -> str:
    inner = "".join(f"<td{' class=l' if i == left else ''}>{escape(cell)}</td>" for i, cell in enumerate(cells))
    return f'<tr class="{kind}">{inner}</tr>'


def _tabled(titles: Sequence[str], body: Sequence[str], left: int) -> str:
    head = "".join(f"<th{' class=l' if i == left else ''}>{escape(title)}</th>" for i, title in enumerate(titles))
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"


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
    return _section("Acceptance by depth", DEPTHS, lines(series, axes))


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
    return _section("Speed by batch size", f"At temperature {first:g}.", lines(series, axes))


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
        panels.append((f"{name(row)}, temperature {row['temperature']:g}{batch}", _tabled(titles, body, 0)))
    return panels


def _task(title: str, prompts: int, one: Row, deepest: int) -> str:
    shares = [*one["acceptance_per_depth"], *[0.0] * deepest][:deepest]
    heat = "".join(f'<td class="heat" style="--v:{share:.3f}">{share:.2f}</td>' for share in shares)
    cells = "".join(f"<td>{cell}</td>" for cell in (str(prompts), *speeds(one)))
    return f"<tr><td class=l>{escape(title)}</td>{cells}{heat}</tr>"


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
        (f"{one['head']}, temperature {one['temperature']:g}, {one['task']}", _text(one, hues[one["head"]]))
        for one in report["samples"]
    ]


def _text(sample: Row, hue: int) -> str:
    """The end of the prompt, and each run as a stretch of tokens."""
    pieces, place, shown = sample["pieces"], 1, []
    parts = [f'<span class="prompt">{escape(sample["prompt"])}</span>', _run(pieces[:1], "the pass over the prompt")]
    for number, run in enumerate(sample["runs"], 1):
        if place >= len(pieces):
            break
        parts.append(_run(pieces[place : place + run], f"pass {number}: {run} {'token' if run == 1 else 'tokens'}"))
        shown.append(run)
        place += run
    return f'{strip(shown, hue)}<div class="text">{"".join(parts)}</div>'


def _run(pieces: Sequence[str], title: str) -> str:
    inner = "".join(f"<b>{escape(piece)}</b>" for piece in pieces)
    strength = min(len(pieces), STRONGEST) - 1
    return f'<span class="run{" one" if len(pieces) < 2 else ""}" style="--n:{strength}" title="{escape(title)}">{inner}</span>'
