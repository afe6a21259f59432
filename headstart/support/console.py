"""Console output: colours on a terminal that supports them, aligned plain text elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

WIDE = 1000
"""Width in columns without a terminal, so that nothing is wrapped or cut in a file or a pipe."""


def stdout_console() -> Console:
    """Return a console on standard output. NO_COLOR and TERM=dumb disable all styles, not only colours."""
    plain = bool(os.environ.get("NO_COLOR")) or not sys.stdout.isatty()
    return Console(
        color_system=None if plain else "auto", width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False, emoji=False
    )


def labelled(rows: Iterable[tuple[str, str]]) -> Table:
    """Make a table with a label and a text per row."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=8, no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, text)
    return table
