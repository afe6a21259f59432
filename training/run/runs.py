"""Training runs beside each other: their latest values and the recipe keys in which they differ, as tables."""

from collections.abc import Iterable, Mapping, Sequence
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
            trained = f"they train heads on {backbones[first]} and on {backbone}"
            raise UserError(f"{first} and {path} cannot be compared: {trained}; give runs on one backbone")
    return logs


def print_runs(logs: Mapping[str, list[Line]], out: TextIO) -> None:
    """Print the latest values of each run and the recipe keys that differ."""
    show([_latest(logs), *_differences(logs)], out)


def _recipe(log: Iterable[Line]) -> Line:
    """The recipe, of a resumed run the last one; empty if there is none yet."""
    found: Line = {}
    for line in log:
        found = line.get("recipe", found)
    return found


def _latest(logs: Mapping[str, list[Line]]) -> Table:
    rows: list[list[str]] = []
    for path, log in logs.items():
        recipe, lines = _recipe(log), [line for line in log if "loss" in line or "tau" in line]
        several = recipe.get("heads") or {}
        for name in dict.fromkeys(line.get("head", "") for line in lines):
            own = [line for line in lines if line.get("head", "") == name]
            last = {key: value for line in own for key, value in line.items() if value is not None}
            kind = (several.get(name) or recipe.get("drafter") or {}).get("kind", "heads")
            forms = (("loss", ".4g"), ("grad_norm", ".4g"), ("tau", ".3f"))
            loss, norm, tau = (f"{last[key]:{form}}" if key in last else "" for key, form in forms)
            skipped = str(sum(line.get("skipped", 0) for line in own))  # whose loss or gradient was not finite
            shares = [f"{share:.2f}" for share in last.get(ACCEPTANCE, [])]
            rows.append([f"{path}, {name}" if len(several) > 1 else path, kind, loss, norm, skipped, tau, *shares])
    titles = ["", "kind", "loss", "gradient norm", "steps skipped", "accept len (tau)"]
    titles += [f"depth {i}" for i in range(max(map(len, rows), default=0) - len(titles))]
    return Table(titles, [("", row) for row in rows], left=[0, 1])


def _differences(logs: Mapping[str, list[Line]]) -> list[Table]:
    """The dotted recipe keys that are not the same in all runs, with a column for each run; nothing if there are none."""
    flat = [flattened(_recipe(log)) for log in logs.values()]
    keys = [key for key in dict.fromkeys(key for values in flat for key in values) if key not in IGNORED]
    rows = [[key, *(str(values.get(key, "")) for values in flat)] for key in keys if len({str(values.get(key, "")) for values in flat}) > 1]
    return [Table(["key", *logs], [("", row) for row in rows], left=range(1 + len(logs)))] if rows else []
