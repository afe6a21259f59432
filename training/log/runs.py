"""Several training runs on one page: the charts of `report` with a line per run, and the recipe keys in which the runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from headstart.support.errors import UserError
from headstart.support.report.page import Table, TableRow, render
from headstart.support.report.terminal import columns, show
from headstart.training.log.report import (
    ACCEPTANCE,
    Head,
    Line,
    about_run,
    by_depth,
    charts,
    heads_of,
    latest,
    read_log,
    samples_of,
    start_of,
)

LOG = "log.jsonl"
IGNORED = ("save.dir", "log.name", "log.project")
"""Keys that differ between any two runs."""


def read_runs(paths: Sequence[str]) -> dict[str, list[Line]]:
    """Read the logs of runs, by folder. Raises UserError for a folder without a log and for runs on different backbones."""
    logs: dict[str, list[Line]] = {}
    for path in paths:
        file = Path(path) / LOG
        try:
            logs[path] = read_log(file)
        except OSError:
            raise UserError(f"{path} holds no {LOG}: not the folder of a training run (save.dir); give one") from None
        if "backbone" not in start_of(logs[path])["recipe"]:
            raise UserError(f"{file} names no recipe: the run has not started yet, or the file is another log")
    backbones = {path: start_of(log)["recipe"]["backbone"].get("path") for path, log in logs.items()}
    first = paths[0]
    for path, backbone in backbones.items():
        if backbone != backbones[first]:
            raise UserError(
                f"{first} and {path} cannot be compared: they train heads on {backbones[first]} and on {backbone};"
                " give runs on one backbone"
            )
    return logs


def runs_page(logs: Mapping[str, list[Line]]) -> str:
    """Render the page."""
    runs = _heads(logs)
    heads = [head for own in runs.values() for head in own]
    return render(
        "training.html.j2",
        title=f"{start_of(next(iter(logs.values())))['recipe']['backbone']['path']}: {len(logs)} runs",
        about=[about_run(path, runs[path], start_of(log)) for path, log in logs.items()],
        drafters=latest(heads),
        charts=list(charts(heads, [own[0] for own in runs.values() if own])),
        accuracy=by_depth(heads, "accuracy", "share of label tokens"),
        acceptance=by_depth(heads, ACCEPTANCE, "share of decoding steps"),
        samples=list(samples_of(heads)),
        differences=_differences(logs),
        recipe="",
    )


def print_runs(logs: Mapping[str, list[Line]], out: TextIO) -> None:
    """Print the latest values of each run and the recipe keys that differ."""
    table, differences = latest([head for own in _heads(logs).values() for head in own]), _differences(logs)
    rows = [("", [*row.cells, *(f"{share:.2f}" for share in row.heat if share is not None)]) for row in table.rows]
    parts = [columns(table.titles, [(style, [*cells, *[""] * (len(table.titles) - len(cells))]) for style, cells in rows], left=[0, 1])]
    if differences is not None:
        parts.append(columns(differences.titles, [("", row.cells) for row in differences.rows], left=range(len(differences.titles))))
    show(parts, out)


def _heads(logs: Mapping[str, list[Line]]) -> dict[str, list[Head]]:
    """The heads of each run, named by it, each with a colour of its own."""
    found: dict[str, list[Head]] = {}
    hue = 0
    for path, log in logs.items():
        own = heads_of(log, start_of(log)["recipe"])
        found[path] = [replace(head, name=path if len(own) == 1 else f"{path}, {head.name}", hue=hue + i) for i, head in enumerate(own)]
        hue += len(own)
    return found


def _differences(logs: Mapping[str, list[Line]]) -> Table | None:
    """The dotted recipe keys that are not the same in all runs, with a column for each run; None if there are none."""
    flat = [_flat(start_of(log)["recipe"]) for log in logs.values()]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in IGNORED]
    rows = [[key, *(str(one.get(key, "")) for one in flat)] for key in keys if len({str(one.get(key, "")) for one in flat}) > 1]
    return Table(["key", *logs], [TableRow(row) for row in rows]) if rows else None


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {key: value for name, below in tree.items() for key, value in _flat(below, f"{prefix}.{name}" if prefix else str(name)).items()}
