"""Report of a training run as an HTML page with plots, ``<save.dir>/report.html``, made from ``log.jsonl`` alone.

Several heads share plots, one line each; plots with a line per depth are repeated for each head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from headstart.support.files import write_text
from headstart.support.form import Form, fault
from headstart.support.json_text import log_lines
from headstart.support.report.charts import Axes, Series, across, around, lines, short
from headstart.support.report.page import Sample, Table, TableRow, render
from headstart.training.recipe.yaml_text import dump_yaml

Line = dict[str, Any]
Points = list[tuple[float, float]]
ACCEPTANCE = "acceptance_per_depth"
MOST = 200
"""Maximum number of points of a curve; in longer logs, a point is the mean of several lines."""
LOSS = (
    "Per label token, as the objective adds up its terms and depths: not comparable between heads with different objectives."
    " With a draft vocabulary KL can be below 0, since the backbone's distribution is not renormalised over it."
)
TAU = "Mean acceptance length (tau) on held-out prompts: tokens per forward pass, the backbone's own included."
DEPTHS = "At the last evaluation: the share of decoding steps that accepted the draft of a depth; tau is 1 plus the sum of a line's points."
NORM = "Before clipping; a mean over the steps of a line of the log."
SKIPPED = "Steps without an update, since their loss or gradient was not finite: all so far."


@dataclass
class Head:
    """The log lines of one head."""

    name: str
    kind: str
    hue: int
    steps: list[Line] = field(default_factory=list)
    """Lines of training steps."""
    evaluations: list[Line] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        return sum(line.get("skipped", 0) for line in self.steps)

    def curve(self, key: str, of: list[Line], x: str = "step", at: int | None = None) -> Points:
        """Return ``key`` (entry ``at`` of lists) over ``x``; finite values only."""
        points = [(line[x], line[key] if at is None else line[key][at]) for line in of if at is None or at < len(line[key])]
        return _thinned([(x, y) for x, y in points if y is not None and math.isfinite(y)])

    def last(self, key: str) -> Any:
        """Return the latest value of ``key``; None if no line has it."""
        return next((line[key] for line in reversed(self.steps + self.evaluations) if line.get(key) is not None), None)


def write_report(folder: Path) -> Path:
    """Write ``folder/report.html`` from ``folder/log.jsonl`` atomically. Raises OSError on disk errors."""
    target = folder / "report.html"
    write_text(target, page(read_log(folder / "log.jsonl")))
    return target


def page(log: Iterable[Line]) -> str:
    """Render the page from log lines."""
    log = list(log)
    started = start_of(log)
    recipe = started["recipe"]
    heads = heads_of(log, recipe)
    return render(
        "training.html.j2",
        title=recipe.get("backbone", {}).get("path", "a training run"),
        about=[about_run(recipe.get("save", {}).get("dir", ""), heads, started)],
        drafters=latest(heads),
        charts=list(charts(heads, heads[:1])),
        accuracy=by_depth(heads, "accuracy", "share of label tokens"),
        acceptance=by_depth(heads, ACCEPTANCE, "share of decoding steps"),
        samples=list(samples_of(heads)),
        differences=None,
        recipe=dump_yaml(recipe) if recipe else "",
    )


def start_of(log: Sequence[Line]) -> Line:
    """Return the line with the recipe, the last one of a resumed run; an empty recipe if there is none yet."""
    return next((line for line in reversed(log) if "recipe" in line), {"recipe": {}})


class Start(Form):
    backbone: dict[str, Any] = {}


class Example(Form):
    prompt: str
    tokens: list[str]
    accept_lengths: list[int]


class LogLine(Form):
    """What is read of a log line, if it is there."""

    recipe: Start = Start()
    steps: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    lr: float = 0.0
    tokens: int = 0
    tokens_per_second: float = 0.0
    accuracy: list[float] = []
    alpha: list[float] = []
    tau: float = 0.0
    acceptance_per_depth: list[float] = []
    examples: list[Example] = []
    head: str = ""


def read_log(path: Path) -> list[Line]:
    """Read the log lines; what was cut off, damaged or is of another form is left out."""
    return [line for _, line in log_lines(path) if fault(LogLine, line) is None]


def heads_of(log: Iterable[Line], recipe: Line) -> list[Head]:
    """Group log lines by head, in order of first appearance."""
    heads: dict[str, Head] = {}
    several = recipe.get("heads") or {}
    for line in log:
        if not ("loss" in line or "tau" in line):
            continue
        name = line.get("head", "")
        if name not in heads:
            kind = (several.get(name) or recipe.get("drafter") or {}).get("kind", "heads")
            heads[name] = Head(name or kind, kind, len(heads))
        (heads[name].steps if "loss" in line else heads[name].evaluations).append(line)
    return list(heads.values())


def about_run(folder: str, heads: Sequence[Head], started: Line) -> str:
    """Say in one line how far the run in ``folder`` is."""
    if not heads or not heads[0].steps:
        return "Nothing has been logged yet."
    steps, seconds, before = heads[0].steps, 0.0, 0
    for line in steps:
        seconds += (line["tokens"] - before) / max(line["tokens_per_second"], 1e-9)
        before = line["tokens"]
    hours, rest = divmod(round(seconds), 3600)
    step = f"step {steps[-1]['step']:,}" + (f" of {started['steps']:,}" if "steps" in started else "")
    return f"{folder}: {step}; {before:,} tokens, {hours}:{rest // 60:02}:{rest % 60:02} in steps"


def latest(heads: Sequence[Head]) -> Table:
    """Make a table of the latest values of each head."""
    depths = max((len(head.last(ACCEPTANCE) or []) for head in heads), default=0)
    titles = ["", "kind", "loss", "gradient norm", "steps skipped", "accept len (tau)", *(f"depth {i}" for i in range(depths))]
    rows = []
    for head in heads:
        cells = [head.name, head.kind, *(_number(head.last(key)) for key in ("loss", "grad_norm")), str(head.skipped)]
        cells.append("" if (tau := head.last("tau")) is None else f"{tau:.3f}")
        rows.append(TableRow(cells, head.last(ACCEPTANCE) or [], css="head"))
    return Table(titles, rows)


@dataclass(frozen=True)
class Chart:
    """A plot with its title and description."""

    title: str
    about: str
    plot: Markup | None


def charts(heads: Sequence[Head], runs: Sequence[Head]) -> Iterable[Chart]:
    """Yield the charts with one line per head; that of the speed has one line per run (``runs``: a head of each)."""

    def train(key: str, x: str = "step", of: Sequence[Head] = heads) -> list[Series]:
        return [Series(head.name, head.curve(key, head.steps, x), head.hue) for head in of]

    yield Chart("Loss", _note(LOSS, heads), _plot(train("loss", "tokens"), "training tokens", "loss"))
    taus = [Series(head.name, head.curve("tau", head.evaluations), head.hue) for head in heads]
    yield Chart("Mean acceptance length", TAU, _plot(taus, "step", "tau"))
    yield Chart("Acceptance by depth", DEPTHS, _last_acceptance(heads))
    yield Chart("Learning rate", "By the schedule.", _plot(train("lr"), "step", "learning rate"))
    yield Chart("Gradient norm", _note(NORM, heads), _plot(train("grad_norm"), "step", "norm"))
    speed = _note("Of the steps alone; evaluations and checkpoints are not in it.", heads)
    yield Chart("Speed", speed, _plot(train("tokens_per_second", of=runs), "step", "tokens per second"))
    if any(head.skipped for head in heads):
        skipped = [Series(head.name, _skipped(head), head.hue) for head in heads]
        yield Chart("Skipped steps", SKIPPED, _plot(skipped, "step", "steps"))


def _last_acceptance(heads: Sequence[Head]) -> Markup | None:
    series = [Series(head.name, list(enumerate(head.last(ACCEPTANCE))), head.hue) for head in heads if head.last(ACCEPTANCE)]
    depths = max((len(one.points) for one in series), default=0)
    return lines(series, Axes(range(depths), 1.0, "depth", "share of decoding steps")) if series else None


def by_depth(heads: Sequence[Head], key: str, title: str) -> list[tuple[str, Markup]]:
    """Plot ``key`` over the steps: one plot per head, one line per depth."""
    plots = []
    for head in heads:
        log = head.evaluations if key == ACCEPTANCE else head.steps
        depths = max((len(line[key]) for line in log), default=0)
        series = [Series(f"depth {i}", head.curve(key, log, at=i), i, dashed=i >= 6) for i in range(depths)]
        plots.append((head.name, _plot(series, "step", title, 1.0)))
    return [(name, plot) for name, plot in plots if plot]


def _plot(series: Sequence[Series], x_title: str, y_title: str, top: float | None = None) -> Markup | None:
    """Plot lines over counts from 0; None if there are no points."""
    series = [one for one in series if one.points]
    if not series:
        return None
    last = max(int(x) for one in series for x, _ in one.points)
    lowest, highest = around([y for one in series for _, y in one.points])
    return lines(series, Axes(across(last), highest if top is None else top, x_title, y_title, even=False, bottom=lowest))


def _thinned(points: Points) -> Points:
    """Reduce to at most MOST points, each the mean of consecutive ones at the x of the last."""
    size = math.ceil(len(points) / MOST) or 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _note(about: str, heads: Sequence[Head]) -> str:
    size = math.ceil(max((len(head.steps) for head in heads), default=0) / MOST)
    return about if size < 2 else f"{about} A point is the mean of {size} lines of the log."


def _skipped(head: Head) -> Points:
    total, points = 0, []
    for line in head.steps:
        total += line.get("skipped", 0)
        points.append((float(line["step"]), float(total)))
    return points[:: math.ceil(len(points) / MOST) or 1]


def samples_of(heads: Sequence[Head]) -> Iterable[Sample]:
    """Yield the texts of the last evaluation of each head."""
    for head in heads:
        for number, example in enumerate(head.last("examples") or [], 1):
            yield Sample.of(f"{head.name}, prompt {number}", example, head.hue)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1e4 else short(value)
