"""A training run as one HTML page with plots, ``<save.dir>/report.html``, made of ``log.jsonl`` alone and so at any time again.

Several heads are a line each in the same plots; what has a line for each depth has a panel for each head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from headstart.support.files import write_text
from headstart.support.report.charts import Axes, Series, across, around, lines, short
from headstart.support.report.markup import RUNS, document, heat, panels, passes, section, tabled
from headstart.training.recipe.yaml_text import dump_yaml

Line = dict[str, Any]
Points = list[tuple[float, float]]
ACCEPTANCE = "acceptance_per_depth"
MOST = 200
"""Points of a curve; of a longer log, each is the mean of several lines."""
LOSS = (
    "Per learned token, as the objective adds up its terms and depths: of heads with different objectives not to be compared."
    " With a draft vocabulary KL can be below 0, since the backbone's distribution is not renormalised over it."
)
TAU = "Tokens per backbone pass, its own included, by really decoding held-out prompts; 1 is plain decoding."
DEPTHS = "At the last evaluation: the share of passes in which the draft of a depth was accepted; tau is 1 plus the sum of a line's points."
ACCEPTED = "The same at every evaluation."
ACCURACY = "Of the learned tokens of the training data: how often a depth's first choice was the backbone's."
NORM = "Before clipping; a mean over the steps of a line of the log."
SKIPPED = "Steps that were not taken, since their loss or gradient was not finite: all so far."


@dataclass
class Head:
    """What a log says of one head."""

    name: str
    kind: str
    hue: int
    steps: list[Line] = field(default_factory=list)
    """Training's numbers."""
    evaluations: list[Line] = field(default_factory=list)

    @property
    def skipped(self) -> int:
        return sum(line.get("skipped", 0) for line in self.steps)

    def curve(self, key: str, of: list[Line], x: str = "step", at: int | None = None) -> Points:
        """``key`` over ``x``, of lists their entry ``at``; without what is not a finite number."""
        found = [(line[x], line[key] if at is None else line[key][at]) for line in of if at is None or at < len(line[key])]
        return _thinned([(x, y) for x, y in found if y is not None and math.isfinite(y)])

    def last(self, key: str) -> Any:
        """What the newest line that has it says; None without one."""
        return next((line[key] for line in reversed(self.steps + self.evaluations) if line.get(key) is not None), None)


def write_report(folder: Path) -> Path:
    """Make ``folder/report.html`` of ``folder/log.jsonl``, in place of an earlier one at once. Raises OSError for what the disk refuses."""
    target = folder / "report.html"
    write_text(target, page(_read(folder / "log.jsonl")))
    return target


def page(log: Iterable[Line]) -> str:
    """The page of a log's lines."""
    log = list(log)
    started: Line = next((line for line in reversed(log) if "recipe" in line), {"recipe": {}})
    heads = _heads(log, started["recipe"])
    name = started["recipe"].get("backbone", {}).get("path", "a training run")
    parts = [
        f"<h1>{escape(name)}</h1><p class='soft'>{escape(_about(heads, started))}</p>",
        section("Where it stands", TAU, _table(heads)),
        f"<div class='charts'>{''.join(_charts(heads))}</div>",
        section("Accuracy by depth", ACCURACY, _by_depth(heads, "accuracy", "share of learned tokens")),
        section("Acceptance by depth, over the steps", ACCEPTED, _by_depth(heads, ACCEPTANCE, "share of passes")),
        section("What each pass wrote", f"Held-out prompts at the last evaluation. {RUNS}", panels(_examples(heads))),
        section("Recipe", "With every default written out.", _recipe(started["recipe"])),
    ]
    return document(name, parts)


def _read(path: Path) -> list[Line]:
    """All whole lines; the last may still be under way."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _heads(log: Iterable[Line], recipe: Line) -> list[Head]:
    """In the order in which they first appear."""
    found: dict[str, Head] = {}
    several = recipe.get("heads") or {}
    for line in log:
        if not ("loss" in line or "tau" in line):
            continue
        name = line.get("head", "")
        if name not in found:
            kind = (several.get(name) or recipe.get("drafter") or {}).get("kind", "heads")
            found[name] = Head(name or kind, kind, len(found))
        (found[name].steps if "loss" in line else found[name].evaluations).append(line)
    return list(found.values())


def _about(heads: Sequence[Head], started: Line) -> str:
    if not heads or not heads[0].steps:
        return "Nothing has been logged yet."
    steps, seconds, before = heads[0].steps, 0.0, 0
    for line in steps:
        seconds += (line["tokens"] - before) / max(line["tokens_per_second"], 1e-9)
        before = line["tokens"]
    hours, rest = divmod(round(seconds), 3600)
    step = f"step {steps[-1]['step']:,}" + (f" of {started['steps']:,}" if "steps" in started else "")
    return f"{started['recipe'].get('save', {}).get('dir', '')}: {step}; {before:,} tokens, {hours}:{rest // 60:02}:{rest % 60:02} in steps"


def _table(heads: Sequence[Head]) -> str:
    deepest = max((len(head.last(ACCEPTANCE) or []) for head in heads), default=0)
    titles = ["", "kind", "loss", "gradient norm", "steps skipped", "tau", *(f"depth {i}" for i in range(1, deepest + 1))]
    rows = []
    for head in heads:
        told = [head.kind, *(_number(head.last(key)) for key in ("loss", "grad_norm")), str(head.skipped)]
        told.append("" if (tau := head.last("tau")) is None else f"{tau:.3f}")
        shares = head.last(ACCEPTANCE) or []
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in told) + heat(shares) + "<td></td>" * (deepest - len(shares))
        rows.append(f"<tr class='head'><td class=l>{escape(head.name)}</td>{cells}</tr>")
    return tabled(titles, rows, 0) if rows else ""


def _charts(heads: Sequence[Head]) -> Iterable[str]:
    """Those that have a line for each head."""
    def train(key: str, x: str = "step") -> list[Series]:
        return [Series(head.name, head.curve(key, head.steps, x), head.hue) for head in heads]

    yield section("Loss", _note(LOSS, heads), _plot(train("loss", "tokens"), "tokens read", "loss"))
    taus = [Series(head.name, head.curve("tau", head.evaluations), head.hue) for head in heads]
    yield section("Accepted tokens per pass", TAU, _plot(taus, "step", "tau"))
    yield section("Acceptance by depth", DEPTHS, _last_acceptance(heads))
    yield section("Learning rate", "By the schedule.", _plot(train("lr"), "step", "learning rate"))
    yield section("Gradient norm", _note(NORM, heads), _plot(train("grad_norm"), "step", "norm"))
    speed = _note("Of the steps alone; evaluations and checkpoints are not in it.", heads)
    yield section("Speed", speed, _plot(train("tokens_per_second")[:1], "step", "tokens a second"))
    if any(head.skipped for head in heads):
        yield section("Skipped steps", SKIPPED, _plot([Series(head.name, _skipped(head), head.hue) for head in heads], "step", "steps"))


def _last_acceptance(heads: Sequence[Head]) -> str:
    series = [Series(head.name, list(enumerate(head.last(ACCEPTANCE), 1)), head.hue) for head in heads if head.last(ACCEPTANCE)]
    deepest = max((len(one.points) for one in series), default=0)
    return lines(series, Axes(range(1, deepest + 1), 1.0, "depth", "share of passes")) if series else ""


def _by_depth(heads: Sequence[Head], key: str, title: str) -> str:
    """A panel for each head, with a line for each depth over the steps."""
    found = []
    for head in heads:
        of = head.evaluations if key == ACCEPTANCE else head.steps
        deepest = max((len(line[key]) for line in of), default=0)
        series = [Series(f"depth {i + 1}", head.curve(key, of, at=i), i, dashed=i >= 6) for i in range(deepest)]
        found.append((head.name, _plot(series, "step", title, 1.0)))
    return panels((name, plot) for name, plot in found if plot)


def _plot(series: Sequence[Series], x_title: str, y_title: str, top: float | None = None) -> str:
    """Lines over what is counted from 0; nothing where there are no points."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return ""
    furthest = max(int(x) for one in drawn for x, _ in one.points)
    lowest, highest = around([y for one in drawn for _, y in one.points])
    return lines(drawn, Axes(across(furthest), highest if top is None else top, x_title, y_title, even=False, bottom=lowest))


def _thinned(points: Points) -> Points:
    """At most MOST: each the mean of as many that follow one another, at the place of the last of them."""
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


def _examples(heads: Sequence[Head]) -> Iterable[tuple[str, str]]:
    for head in heads:
        for number, example in enumerate(head.last("examples") or [], 1):
            yield f"{head.name}, prompt {number}", passes(example, head.hue)


def _recipe(recipe: Line) -> str:
    return f"<pre>{escape(dump_yaml(recipe))}</pre>" if recipe else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 1e4 else short(value)
