"""Tables for the terminal and for pages. On a terminal they are coloured unless NO_COLOR is set, elsewhere plain aligned columns."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import table
from rich.console import Console, RenderableType
from rich.text import Text

WIDTH = 1000
"""Width in columns for layout, so that cells are never wrapped or cut; a narrower terminal wraps whole lines."""


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
