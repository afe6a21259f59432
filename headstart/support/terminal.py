"""Output for people: tables, aligned text and progress, on a terminal coloured unless NO_COLOR is set; and reports as one HTML page."""

import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TextIO, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich import table
from rich.console import Console, RenderableType
from rich.text import Text
from tqdm import tqdm

WIDTH = 1000
"""Width in columns for layout, so that cells are never wrapped or cut; a narrower terminal wraps whole lines."""


def stdout_console() -> Console:
    """Return a console on standard output. NO_COLOR and TERM=dumb disable all styles, not only colours."""
    plain = bool(os.environ.get("NO_COLOR")) or not sys.stdout.isatty()
    return Console(
        color_system=None if plain else "auto", width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False, emoji=False
    )


def labelled(rows: Iterable[tuple[str, str]]) -> table.Table:
    """Make a table with a label and a text per row."""
    grid = table.Table.grid(padding=(0, 2))
    grid.add_column(min_width=8, no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, text)
    return grid


@dataclass(frozen=True)
class Table:
    """Rows of a style and cells, which may be fewer than the titles. Columns are aligned right, those in ``left`` left."""

    titles: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str | Text]]]
    left: Sequence[int] = ()

    def __rich__(self) -> table.Table:
        """The table for the terminal."""
        drawn = table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for number, title in enumerate(self.titles):
            drawn.add_column(Text(title), justify="left" if number in self.left else "right", no_wrap=True)
        for style, cells in self.rows:
            drawn.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells), style=style)
        return drawn


def show(parts: Sequence[RenderableType], out: TextIO) -> None:
    """Print the parts, separated by empty lines."""
    colour = Console(file=out)
    buffer = io.StringIO()
    console = Console(
        file=buffer, width=WIDTH, force_terminal=colour.is_terminal, color_system="auto" if colour.is_terminal else None, highlight=False
    )
    for number, part in enumerate(parts):
        console.print(*([""] if number else []), end="\n" if number else "")
        console.print(part)
    print("\n".join(line.rstrip() for line in buffer.getvalue().splitlines()), file=out)


Item = TypeVar("Item")
FILE_SECONDS = 5.0
"""Seconds between two states of a bar that is written to a file or pipe."""


def progress(what: str, unit: str, total: int | None, shown: bool = True) -> tqdm:
    """Return a progress bar, which the caller updates and closes; ``shown`` False: one that writes nothing."""
    terminal = sys.stderr.isatty()
    return tqdm(
        desc=what, unit=unit, total=total, unit_scale=unit == "token", disable=not shown, leave=not terminal, dynamic_ncols=terminal,
        mininterval=0.1 if terminal else FILE_SECONDS, miniters=0,
    )  # fmt: skip


def watched(items: Iterable[Item], what: str, unit: str) -> Iterator[Item]:
    """Yield the items, beside a bar of how many the caller is done with."""
    with progress(what, unit, len(items) if isinstance(items, Sized) else None) as bar:
        for item in items:
            yield item
            bar.update()


_environment = Environment(
    loader=PackageLoader("headstart.support", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


@dataclass(frozen=True)
class Section:
    """A titled part of a page: a sentence about it, and tables and other HTML."""

    title: str
    about: str
    parts: Sequence[Table | Markup]


def page(title: str, about: Sequence[str], sections: Sequence[Section]) -> str:
    """Render a whole page. Sections without parts are left out."""
    shown = [section for section in sections if section.parts]
    return _environment.get_template("page.html.j2").render(title=title, about=about, sections=shown)
