"""Training runs beside each other: their latest values and the recipe keys in which they differ, as tables and as a page with charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from headstart.support.errors import UserError
from headstart.support.json_text import Form, fault, flattened, log_lines
from headstart.support.page import Section, Series, charts, page
from headstart.support.terminal import Table, show

Line = dict[str, Any]
LOG = "log.jsonl"
IGNORED = ("save.dir", "log.name", "log.project")
"""Keys that differ between any two runs."""
ACCEPTANCE = "acceptance_per_depth"
LATEST = (
    "Mean acceptance length (tau): tokens per forward pass of the backbone, its own included, by really decoding held-out prompts; 1 is"
    " autoregressive decoding."
)
CURVES = {
    "loss": ("Loss", "As the objective adds up its terms: not comparable between heads with different objectives.", "loss"),
    "tau": ("Mean acceptance length", "On held-out prompts.", "tau"),
    "lr": ("Learning rate", "By the schedule.", "learning rate"),
    "grad_norm": ("Gradient norm", "Before clipping; a mean over the steps of a line of the log.", "norm"),
    "tokens_per_second": ("Speed", "Of the steps alone; evaluations and checkpoints are not in it.", "tokens per second"),
}
"""Keys of log lines that are drawn over the steps: the chart's title, a sentence about it, and the name of the axis."""
ACCEPTED = "At the last evaluation: the share of decoding steps that accepted the draft of a depth; tau is 1 plus the sum of the points."


class Start(Form):
    backbone: dict[str, Any] = {}


class LogLine(Form):
    """What is read of a log line, if it is there."""

    recipe: Start = Start()
    steps: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    lr: float = 0.0
    tokens_per_second: float = 0.0
    tau: float = 0.0
    acceptance_per_depth: list[float] = []
    head: str = ""


@dataclass
class Head:
    """The log lines of one head, training steps and evaluations; ``hue`` is the number of its colour."""

    name: str
    kind: str
    hue: int
    lines: list[Line] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        """Steps without an update, since their loss or gradient was not finite."""
        return sum(line.get("skipped", 0) for line in self.lines)

    def curve(self, key: str) -> list[tuple[float, float]]:
        """Return ``key`` over the steps; finite values only."""
        found = [(line["step"], line[key]) for line in self.lines if line.get(key) is not None]
        return [(step, value) for step, value in found if math.isfinite(value)]

    def last(self, key: str) -> Any:
        """Return the latest value of ``key``; None if no line has it."""
        return next((line[key] for line in reversed(self.lines) if line.get(key) is not None), None)


def read_runs(paths: Sequence[str]) -> dict[str, list[Line]]:
    """Read the logs of runs, by folder. Raises UserError for a folder without a log and for runs on different backbones."""
    logs: dict[str, list[Line]] = {}
    for path in paths:
        file = Path(path) / LOG
        try:
            logs[path] = [line for _, line in log_lines(file) if fault(LogLine, line) is None]
        except OSError:
            raise UserError(f"{path} holds no {LOG}: not the folder of a training run (save.dir); give one") from None
        if "backbone" not in _recipe(logs[path]):
            raise UserError(f"{file} names no recipe: the run has not started yet, or the file is another log")
    backbones = {path: _recipe(log)["backbone"].get("path") for path, log in logs.items()}
    first = paths[0]
    for path, backbone in backbones.items():
        if backbone != backbones[first]:
            raise UserError(
                f"{first} and {path} cannot be compared: they train heads on {backbones[first]} and on {backbone};"
                " give runs on one backbone"
            )
    return logs


def print_runs(logs: Mapping[str, list[Line]], out: TextIO) -> None:
    """Print the latest values of each run and the recipe keys that differ."""
    show([_latest(_heads(logs)), *_differences(logs)], out)


def runs_page(logs: Mapping[str, list[Line]]) -> str:
    """Render the page."""
    heads = _heads(logs)
    sections = [Section("Latest values", LATEST, [_latest(heads)])]
    for key, (title, about, axis) in CURVES.items():
        sections.append(Section(title, about, charts([Series(head.name, head.curve(key), head.hue) for head in heads], "step", axis)))
    accepted = [Series(head.name, list(enumerate(head.last(ACCEPTANCE) or [])), head.hue) for head in heads]
    sections.append(Section("Acceptance by depth", ACCEPTED, charts(accepted, "depth", "share of decoding steps", 1.0)))
    sections.append(Section("What differs", "The recipe keys that are not the same in all runs.", _differences(logs)))
    backbone = _recipe(next(iter(logs.values())))["backbone"]["path"]
    return page(f"{backbone}: {len(logs)} runs", [", ".join(logs)], sections)


def _recipe(log: Iterable[Line]) -> Line:
    """The recipe, of a resumed run the last one; empty if there is none yet."""
    found: Line = {}
    for line in log:
        found = line.get("recipe", found)
    return found


def _heads(logs: Mapping[str, list[Line]]) -> list[Head]:
    """The heads of all runs in order of first appearance, named by their run, each with a colour of its own."""
    heads: dict[tuple[str, str], Head] = {}
    for path, log in logs.items():
        recipe = _recipe(log)
        several = recipe.get("heads") or {}
        for line in log:
            name = line.get("head", "")
            if "loss" in line or "tau" in line:
                kind = (several.get(name) or recipe.get("drafter") or {}).get("kind", "heads")
                title = f"{path}, {name}" if len(several) > 1 else path
                heads.setdefault((path, name), Head(title, kind, len(heads))).lines.append(line)
    return list(heads.values())


def _latest(heads: Sequence[Head]) -> Table:
    depths = max((len(head.last(ACCEPTANCE) or []) for head in heads), default=0)
    titles = ["", "kind", "loss", "gradient norm", "steps skipped", "accept len (tau)", *(f"depth {i}" for i in range(depths))]
    rows = []
    for head in heads:
        cells = [head.name, head.kind, *(_number(head.last(key)) for key in ("loss", "grad_norm")), str(head.skipped)]
        tau = head.last("tau")
        rows.append(("", [*cells, "" if tau is None else f"{tau:.3f}", *(f"{share:.2f}" for share in head.last(ACCEPTANCE) or [])]))
    return Table(titles, rows, left=[0, 1])


def _differences(logs: Mapping[str, list[Line]]) -> list[Table]:
    """The dotted recipe keys that are not the same in all runs, with a column for each run; nothing if there are none."""
    flat = [flattened(_recipe(log)) for log in logs.values()]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if key not in IGNORED]
    rows = [[key, *(str(one.get(key, "")) for one in flat)] for key in keys if len({str(one.get(key, "")) for one in flat}) > 1]
    return [Table(["key", *logs], [("", row) for row in rows], left=range(1 + len(logs)))] if rows else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
