"""What reports are put together from: a page that needs nothing else, sections, panels, tables, and text with the passes that wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from headstart.support.report.charts import strip
from headstart.support.report.style import CSS, SCRIPT

STRONGEST = 8
"""Runs from this length on are painted alike."""
RUNS = "A stretch of colour is what one pass wrote, the stronger the longer; unmarked tokens came alone. The strip: the passes in order."


def document(title: str, parts: Sequence[str]) -> str:
    """The whole page, of parts that are HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Headstart: {escape(title)}</title><style>{CSS}</style></head>\n"
        f"<body>{''.join(parts)}<script>{SCRIPT}</script></body></html>\n"
    )


def section(title: str, about: str, body: str) -> str:
    """Nothing where there is no ``body``."""
    return f"<section><h2>{escape(title)}</h2><p class='soft'>{escape(about)}</p>{body}</section>" if body else ""


def panels(named: Iterable[tuple[str, str]]) -> str:
    """Named panels, of which the page's script shows one at a time; one that has nothing to tell it from others shows no name."""
    found = list(named)
    inner = "".join(
        f'<div class="panel" data-name="{escape(title)}">{f"<p><b>{escape(title)}</b></p>" if len(found) > 1 else ""}{body}</div>'
        for title, body in found
    )
    return f'<div class="panels">{inner}</div>' if found else ""


def tabled(titles: Sequence[str], body: Sequence[str], left: int) -> str:
    """A table of rows that are HTML; the column ``left`` is text."""
    head = "".join(f"<th{' class=l' if i == left else ''}>{escape(title)}</th>" for i, title in enumerate(titles))
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"


def table_row(kind: str, cells: Sequence[str], left: int) -> str:
    """A row of plain text."""
    inner = "".join(f"<td{' class=l' if i == left else ''}>{escape(cell)}</td>" for i, cell in enumerate(cells))
    return f'<tr class="{kind}">{inner}</tr>'


def heat(shares: Iterable[float]) -> str:
    """Cells of a table row, the darker the larger."""
    return "".join(f'<td class="heat" style="--v:{share:.3f}">{share:.2f}</td>' for share in shares)


def passes(sample: dict[str, Any], hue: int) -> str:
    """The end of the prompt, and each run as a stretch of tokens.

    ``sample``: ``prompt``; ``pieces``, the text of each token; ``runs``, how many tokens each pass wrote behind the first token.
    """
    pieces, place, shown = sample["pieces"], 1, []
    parts = [f'<span class="prompt">{escape(sample["prompt"])}</span>', _run(pieces[:1], "the pass over the prompt")]
    for number, run in enumerate(sample["runs"], 1):
        if place >= len(pieces):
            break
        parts.append(_run(pieces[place : place + run], f"pass {number}: {run} {'token' if run == 1 else 'tokens'}"))
        shown.append(run)
        place += run
    return f'{strip(shown, hue)}<div class="text">{"".join(parts)}</div>'


def _run(pieces: Sequence[str], title: str) -> str:
    inner = "".join(f"<b>{escape(piece)}</b>" for piece in pieces)
    strength = min(len(pieces), STRONGEST) - 1
    return f'<span class="run{" one" if len(pieces) < 2 else ""}" style="--n:{strength}" title="{escape(title)}">{inner}</span>'
