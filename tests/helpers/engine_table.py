"""The table of engines in docs/serving.md; ``python tests/helpers/engine_table.py docs/serving.md`` writes it anew."""

import sys
from pathlib import Path

from headstart.serving.engines import ENGINES, Support, support
from headstart.serving.layouts.checkpoint import METHODS
from headstart.support.files import write_text

BEGIN, END = "<!-- engines: begin -->", "<!-- engines: end -->"


def table() -> str:
    """Return the table of methods and engines, and the notes below it, in Markdown."""
    notes: list[str] = []
    lines = [f"| method | {' | '.join(ENGINES.values())} |", "|---" * (1 + len(ENGINES)) + "|"]
    for method, name in METHODS.items():
        cells = [_cell(engine, method, notes) for engine in ENGINES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{i}. {note}" for i, note in enumerate(notes, 1))])


def _cell(engine: str, method: str, notes: list[str]) -> str:
    """Return an engine's cell, with the number of its note, which is added to ``notes`` if it is new."""
    entry = support(engine, method)
    note = f"{ENGINES[engine]}: {entry.note if isinstance(entry, Support) else entry}"
    if isinstance(entry, Support):
        versions = [f"since {entry.since}"] if entry.since else []
        versions += [f"**up to {entry.until}**"] if entry.until else []
        text = ", ".join([*versions, f"{entry.how} {entry.versions}"])
        if not entry.note:
            return text
    else:
        text = "–"
        if entry == "it has no module for them":
            return text
    if note not in notes:
        notes.append(note)
    return f"{text} ({notes.index(note) + 1})"


def with_table(page: str) -> str:
    """Return a page with the table between its marks, which must be there."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert rest and after, f"the page lacks {BEGIN} or {END}"
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    write_text(path, with_table(path.read_text("utf-8")))
