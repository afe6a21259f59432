"""Charts as inline SVG: lines, histograms and strips of bars. Colours are CSS classes, so that they follow light and dark mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 84, 20, 16, 44
CROWDED = 40
"""Number of points from which a line's dots have no rim, which would cut it into dashes."""


@dataclass(frozen=True)
class Series:
    """A named line of points ``(x, y)``; ``hue`` is its colour number, None for baselines."""

    name: str
    points: Sequence[tuple[float, float]]
    hue: int | None
    dashed: bool = False

    @property
    def style(self) -> str:
        """CSS classes of the line."""
        return f"{'base' if self.hue is None else f'h{self.hue % 6}'}{' dashed' if self.dashed else ''}"


@dataclass(frozen=True)
class Axes:
    """Axes of a chart: ``x_marks`` from left to right, equally spaced if ``even``; y from ``bottom`` to ``top``."""

    x_marks: Sequence[float]
    top: float
    x_title: str
    y_title: str
    even: bool = True
    bottom: float = 0.0

    def x(self, value: float) -> float:
        """Convert an x value to pixels from the left."""
        span = WIDTH - LEFT - RIGHT
        if not self.even:
            return LEFT + span * value / (self.x_marks[-1] or 1)
        if len(self.x_marks) == 1:
            return LEFT + span / 2
        return LEFT + 16 + (span - 32) * list(self.x_marks).index(value) / (len(self.x_marks) - 1)

    def y(self, value: float) -> float:
        """Convert a y value to pixels from the top."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.top - value) / (self.top - self.bottom)

    def svg(self) -> str:
        """Draw the grid, numbers and titles."""
        parts = []
        for mark in ticks(self.top, self.bottom):
            y = self.y(mark)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(mark)}</text>')
        for mark in self.x_marks:
            parts.append(f'<text x="{self.x(mark):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{short(mark)}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class="title" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x_title)}</text>')
        rotated = f'transform="translate(12 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"'
        parts.append(f'<text class="title" text-anchor="middle" {rotated}>{escape(self.y_title)}</text>')
        return "".join(parts)


def ticks(top: float, bottom: float = 0.0) -> list[float]:
    """Return about five round numbers from ``bottom`` to at most ``top``."""
    step = _step(top - bottom)
    return [float(f"{i * step:.10g}") for i in range(math.ceil(bottom / step - 1e-9), math.floor(top / step + 1e-9) + 1)]


def across(most: int) -> list[float]:
    """Return round integers from 0, and ``most`` itself, as marks of an axis of counts."""
    marks = [mark for mark in ticks(most) if mark == int(mark) and most - mark > most / 12]
    return [*marks, float(most)]


def short(number: float) -> str:
    """Format a number for an axis: 15k, 2.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= size:
            return f"{number / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{number:g}"


def above(values: Sequence[float]) -> float:
    """Return a round number slightly above all values, for the top of an axis."""
    most = 1.02 * max(values, default=1.0) or 1.0
    return _step(most) * math.ceil(most / _step(most))


def around(values: Sequence[float]) -> tuple[float, float]:
    """Return round numbers slightly below and above all values and 0, for the ends of an axis."""
    low, high = 1.02 * min(0.0, *values), 1.02 * max(0.0, *values)
    step = _step(high - low)
    bottom, top = step * math.floor(low / step), step * math.ceil(high / step)
    return (bottom, top) if bottom < top else (0.0, 1.0)


def _step(top: float) -> float:
    if top <= 0:
        return 1.0
    least = 10 ** math.floor(math.log10(top / 4))
    return next(least * factor for factor in (1, 2, 2.5, 5, 10) if top / (least * factor) <= 5.5)


def lines(series: Sequence[Series], axes: Axes) -> Markup:
    """Draw each series as a line with dots."""
    curves = "".join(_line(one, axes) for one in series)
    return _figure(axes.svg() + curves, _legend(series))


def histogram(counts: dict[int, int], series: Sequence[Series], axes: Axes) -> Markup:
    """Draw counts as bars, scaled to the highest, and lines over the same x axis on top."""
    most, bars = max(counts.values(), default=1), []
    total = sum(counts.values())
    width = max(4.0, min(14.0, 0.6 * (WIDTH - LEFT - RIGHT) / max(len(counts), 1)))
    for value, count in counts.items():
        high = (HEIGHT - TOP - BOTTOM) * 0.9 * count / most
        bars.append(
            f'<rect class="bar" x="{axes.x(value) - width / 2:.1f}" y="{HEIGHT - BOTTOM - high:.1f}" width="{width:.1f}"'
            f' height="{high:.1f}" rx="2"><title>{value} nodes: {count} steps, {count / total:.0%}</title></rect>'
        )
    curves = "".join(_line(one, axes) for one in series)
    return _figure(axes.svg() + "".join(bars) + curves, _legend(series))


def strip(lengths: Sequence[int], hue: int) -> Markup:
    """Draw a bar per decoding step, in order; its height is the number of tokens the step generated."""
    most, wide = max(lengths, default=1), max(3.0, min(12.0, 900 / max(len(lengths), 1)))
    bars = "".join(
        f'<rect x="{i * wide:.1f}" y="{40 - 40 * length / most:.1f}" width="{wide - 1:.1f}" height="{40 * length / most:.1f}">'
        f"<title>step {i + 1}: {length} {'token' if length == 1 else 'tokens'}</title></rect>"
        for i, length in enumerate(lengths)
    )
    across = wide * max(len(lengths), 1)
    box = f'viewBox="0 0 {across:.0f} 40" preserveAspectRatio="none" style="max-width: {across:.0f}px"'
    return Markup(f'<svg class="strip h{hue % 6}" {box} role="img">{bars}</svg>')


def _line(one: Series, axes: Axes) -> str:
    places = [(axes.x(x), axes.y(y), x, y) for x, y in one.points]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in places)
    radius, crowded = (3.5, "") if len(places) < CROWDED else (1.5, " crowded")
    dots = "".join(
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{radius}"><title>{escape(one.name)}: {y:.4g} at {x:,.12g}</title></circle>'
        for px, py, x, y in places
    )
    return f'<g class="series {one.style}{crowded}"><polyline points="{path}"/>{dots}</g>'


def _legend(series: Sequence[Series]) -> str:
    items = "".join(f'<span class="key {one.style}"><i></i>{escape(one.name)}</span>' for one in series)
    return f'<div class="legend">{items}</div>'


def _figure(content: str, legend: str) -> Markup:
    return Markup(f'<figure>{legend}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{content}</svg></figure>')
