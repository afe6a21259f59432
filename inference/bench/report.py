"""A benchmark report as one self-contained HTML page: tables, charts, and outputs marked by decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from headstart.inference.bench.systems import AR, AR_TRANSFORMERS
from headstart.inference.bench.table import (
    SPEEDS,
    STEP,
    notes,
    rows_at,
    setting_cells,
    setting_titles,
    settings_of,
    speeds,
    step_cells,
)
from headstart.inference.bench.verdict import name, sentence
from headstart.support.report.charts import Axes, Series, above, histogram, lines
from headstart.support.report.page import Sample, Table, TableRow, render

Row = dict[str, Any]


def page(report: Row) -> str:
    """Render the page."""
    versions = ", ".join(f"{library} {version}" for library, version in report["versions"].items())
    about = (
        f"{report['dtype']}, {report['device']}, {report['threads']} threads; {report['prompts']} prompts, up to"
        f" {report['max_new_tokens']} tokens each, seed {report['seed']}; {versions}"
    )
    return render(
        "bench.html.j2",
        title=report["backbone"],
        about=about,
        verdict=report["verdict"],
        sentence=sentence(report),
        speed=_speed(report),
        notes=notes(report),
        depths=_depths(report),
        batches=_batches(report),
        first_temperature=f"{settings_of(report)[0][0]:g}",
        replays=report.get("replays", []),
        heat=_heat(report),
        heat_speeds=_heat_speeds(report),
        tasks=_tasks(report),
        sizes=_sizes(report),
        samples=_samples(report),
    )


def _hues(report: Row) -> dict[str, int]:
    """A colour index for each head."""
    return {head: i for i, head in enumerate(dict.fromkeys(row["head"] for row in report["results"]))}


def _first_batch(report: Row) -> list[Row]:
    """The rows of heads at the first batch size."""
    return [row for row in report["results"] if row["batch"] == report["results"][0]["batch"]]


def _speed(report: Row) -> Table:
    rows = []
    for temperature, batch in settings_of(report):
        for i, row in enumerate(rows_at(report, temperature, batch)):
            css = ("head" if "head" in row else "base") + (" first" if i == 0 else "")
            *cells, identical = step_cells(row)
            marked = Markup('<span class="verdict {}">{}</span>').format(row["verdict"] or "", identical)
            rows.append(TableRow([*setting_cells(report, row), *speeds(row), *cells, marked], css=css))
    titles = setting_titles(report)
    return Table([*titles, *SPEEDS, *STEP], rows, (len(titles) - 1,))


def _depths(report: Row) -> Markup | None:
    """A chart of the acceptance rate by depth, with a line for each head and temperature."""
    rows, hues = _first_batch(report), _hues(report)
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    series = [
        Series(_title(row, temperatures), list(enumerate(row["acceptance_per_depth"])), hues[row["head"]], row["temperature"] > 0)
        for row in rows
        if row["acceptance_per_depth"]
    ]
    if not series:
        return None
    depths = max(len(one.points) for one in series)
    return lines(series, Axes(range(depths), 1.0, "depth", "share of decoding steps"))


def _title(row: Row, temperatures: Sequence[float]) -> str:
    return name(row) + (f", temperature {row['temperature']:g}" if len(temperatures) > 1 else "")


def _batches(report: Row) -> Markup | None:
    """A chart of tokens per second by batch size at the first temperature, with a line for each system."""
    settings, hues = settings_of(report), _hues(report)
    first = settings[0][0]
    batches = sorted(batch for temperature, batch in settings if temperature == first)
    if len(batches) < 2:
        return None
    curves: dict[str, dict[int, float]] = {}
    for batch in batches:
        for row in rows_at(report, first, batch):
            curves.setdefault(name(row), {})[batch] = row["tokens_per_second"]
    curves = {system: points for system, points in curves.items() if len(points) > 1}   # some systems decode only one sequence at a time
    series = [Series(system, sorted(points.items()), hues.get(system), system == AR_TRANSFORMERS) for system, points in curves.items()]
    top = above([speed for points in curves.values() for speed in points.values()])
    return lines(series, Axes(batches, top, "batch size", "tokens per second, all sequences"))


def _tasks(report: Row) -> list[tuple[str, Table]]:
    """A table for each head and setting, with a row for each task and one for all tasks."""
    tables = []
    for row in report["results"]:
        titles = ["task", "prompts", *SPEEDS, *map(str, range(len(row["acceptance_per_depth"])))]
        entries = [(task, report["tasks"][task], one) for task, one in row["tasks"].items()]
        if len(entries) > 1:
            entries.append(("all", report["prompts"], row))
        rows = [TableRow([task, str(prompts), *speeds(one)], one["acceptance_per_depth"]) for task, prompts, one in entries]
        batch = f", batch {row['batch']}" if len({one["batch"] for one in report["results"]}) > 1 else ""
        tables.append((f"{name(row)}, temperature {row['temperature']:g}{batch}", Table(titles, rows)))
    return tables


def _heat(report: Row) -> Table | None:
    """Tau by task, with a column for each head and temperature at the first batch size; None for a single task."""
    rows, tasks = _first_batch(report), list(report["tasks"])
    if len(tasks) < 2:
        return None
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    columns = [_title(row, temperatures) for row in rows]
    body = [TableRow([task, str(report["tasks"][task])], [row["tasks"][task]["tau"] for row in rows]) for task in tasks]
    highest = max(row["tasks"][task]["tau"] for row in rows for task in tasks)
    return Table(["task", "prompts", *columns], body, low=1.0, high=max(highest, 2.0))


def _heat_speeds(report: Row) -> Table | None:
    """Speed by task relative to AR, with a column for each other system and temperature at the first batch size; None for one task."""
    tasks, batch = list(report["tasks"]), report["results"][0]["batch"]
    if len(tasks) < 2:
        return None
    columns: list[str] = []
    values: dict[str, list[float | None]] = {task: [] for task in tasks}
    temperatures = list(dict.fromkeys(row["temperature"] for row in report["results"]))
    for temperature in temperatures:
        rows = list(rows_at(report, temperature, batch))
        plain = next(row for row in rows if name(row) == AR)
        for row in rows:
            if row is not plain:
                columns.append(_title(row, temperatures))
                for task in tasks:
                    pair = [one["tasks"][task]["decode_tokens_per_second"] for one in (row, plain)]
                    values[task].append(pair[0] / pair[1] if all(pair) else None)
    body = [TableRow([task, str(report["tasks"][task])], values[task]) for task in tasks]
    highest = max((value for line in values.values() for value in line if value is not None), default=2.0)
    return Table(["task", "prompts", *columns], body, low=0.5, high=max(highest, 2.0))


def _sizes(report: Row) -> list[tuple[str, Markup]]:
    """A histogram of tree sizes for each head and temperature at the first batch size."""
    plots = []
    for row in _first_batch(report):
        counts = {int(nodes): steps for nodes, steps in row["tree_sizes"].items()}
        curve = [point for one in report.get("costs", []) if one["head"] == row["head"] for point in one["points"]]
        if not counts:
            continue
        hue = _hues(report)[row["head"]]
        series = [Series("verification, ms", [(p["nodes"], p["verify_ms"]) for p in curve], hue)] if curve else []
        series += [Series("the whole step, ms", [(p["nodes"], p["pass_ms"]) for p in curve], hue, True)] if curve else []
        largest = max(*counts, *(p["nodes"] for p in curve), 1)
        marks = sorted({1, *(size for size in (4, 8, 16, 24, 32, 48, 64, 96, 128) if size <= largest), largest})
        marks = [mark for mark in marks if mark == largest or largest - mark > largest / 24]
        axes = Axes(marks, above([p["pass_ms"] for p in curve]), "nodes of a row's tree", "milliseconds per step", even=False)
        plots.append((f"{name(row)}, temperature {row['temperature']:g}", histogram(counts, series, axes)))
    return plots


def _samples(report: Row) -> list[Sample]:
    hues = _hues(report)
    return [
        Sample.of(f"{one['head']}, temperature {one['temperature']:g}, {one['task']}", one, hues[one["head"]]) for one in report["samples"]
    ]
