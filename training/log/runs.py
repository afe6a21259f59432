"""Training runs beside each other: their latest values and the recipe keys in which they differ, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from headstart.support.errors import UserError
from headstart.support.json_text import Form, fault, flattened, log_lines
from headstart.support.terminal import Table, show

Line = dict[str, Any]
LOG = "log.jsonl"
IGNORED = ("save.dir", "log.name", "log.project")
"""Keys that differ between any two runs."""
ACCEPTANCE = "acceptance_per_depth"


class Start(Form):
    backbone: dict[str, Any] = {}


class LogLine(Form):
    """What is read of a log line, if it is there."""

    recipe: Start = Start()
    loss: float | None = None
    grad_norm: float | None = None
    tau: float = 0.0
    acceptance_per_depth: list[float] = []
    head: str = ""


@dataclass
class Head:
    """The log lines of one head, training steps and evaluations."""

    name: str
    kind: str
    lines: list[Line] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        """Steps without an update, since their loss or gradient was not finite."""
        return sum(line.get("skipped", 0) for line in self.lines)

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


def _recipe(log: Iterable[Line]) -> Line:
    """The recipe, of a resumed run the last one; empty if there is none yet."""
    found: Line = {}
    for line in log:
        found = line.get("recipe", found)
    return found


def _heads(logs: Mapping[str, list[Line]]) -> list[Head]:
    """The heads of all runs in order of first appearance, named by their run."""
    heads: dict[tuple[str, str], Head] = {}
    for path, log in logs.items():
        recipe = _recipe(log)
        several = recipe.get("heads") or {}
        for line in log:
            name = line.get("head", "")
            if "loss" in line or "tau" in line:
                kind = (several.get(name) or recipe.get("drafter") or {}).get("kind", "heads")
                title = f"{path}, {name}" if len(several) > 1 else path
                heads.setdefault((path, name), Head(title, kind)).lines.append(line)
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
