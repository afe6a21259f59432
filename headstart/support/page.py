"""Reports as one self-contained HTML page of sections; charts are drawn by matplotlib, an optional dependency (``headstart[report]``)."""

from __future__ import annotations

import importlib.util
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headstart.support.errors import UserError
from headstart.support.terminal import Table
from headstart.support.text import visible

FEW = 12
"""Up to so many values of x, each has its mark, and a line has dots."""
_environment = Environment(
    loader=PackageLoader("headstart.support", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


@dataclass(frozen=True)
class Section:
    """A titled part of a page: a sentence about it, and tables, charts and other HTML."""

    title: str
    about: str
    parts: Sequence[Table | Markup]


@dataclass(frozen=True)
class Series:
    """A named line of points ``(x, y)``; ``hue`` is the number of its colour."""

    name: str
    points: Sequence[tuple[float, float]]
    hue: int
    dashed: bool = False


def page(title: str, about: Sequence[str], sections: Sequence[Section]) -> str:
    """Render a whole page. Sections without parts are left out."""
    shown = [section for section in sections if section.parts]
    return _environment.get_template("page.html.j2").render(title=title, about=about, sections=shown)


def require_charts(option: str) -> None:
    """Raise UserError if matplotlib is not installed; called before anything is measured for the page that ``option`` asks for."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"{option} draws charts with matplotlib, which is not installed; run: pip install 'headstart[report]'")


def charts(series: Sequence[Series], x_title: str, y_title: str, most: float | None = None) -> list[Markup]:
    """Draw the series as lines over one pair of axes, y from 0 (or below) to ``most``; nothing if there are no points."""
    series = [one for one in series if one.points]
    if not series:
        return []
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Names stay text, as given: neither formulas nor outlines. A character that matplotlib has no glyph for is the browser's to draw.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "headstart", "text.parse_math": False}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        figure = Figure(figsize=(7.2, 3.2 + 0.22 * len(series)), layout="constrained")
        axes = figure.subplots()
        few = len(marks := sorted({x for one in series for x, _ in one.points})) <= FEW
        for one in series:
            axes.plot(*zip(*one.points, strict=True), color=f"C{one.hue % 10}", ls="--" if one.dashed else "-", marker="o" if few else "")
        if few:
            axes.set_xticks(marks)
        axes.set_ylim(bottom=min(0.0, *(y for one in series for _, y in one.points)), top=most)
        axes.set(xlabel=x_title, ylabel=y_title)
        axes.grid(alpha=0.3)
        figure.legend(axes.lines, [visible(one.name) for one in series], loc="outside upper left", frameon=False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", bbox_inches="tight", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = drawn.getvalue()
    return [Markup(text[text.index("<svg") :])]
