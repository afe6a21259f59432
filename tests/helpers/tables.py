"""The tables of recipe keys in docs/recipe.md, of engines in docs/serving.md and of arguments in docs/decode.md.

``python tests/helpers/tables.py docs/recipe.md`` writes those of a page anew.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import arguments
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headstart.heads.layers.start_values import LayerShape
from headstart.heads.methods import find_drafter, methods
from headstart.heads.own_readout import ShortlistConfig
from headstart.serving.engines import ENGINES, Support, support
from headstart.serving.layouts.layout import METHODS
from headstart.support.config import describe
from headstart.support.files import write_text
from headstart.training.recipe.recipe import DrafterOptions, Recipe
from headstart.training.recipe.sections import Lora

TABLE = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end of table -->", re.S)


def with_tables(page: str) -> str:
    """The page with what stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->`` made anew."""
    return TABLE.sub(lambda match: f"<!-- table: {match[1]} -->\n{_table(match[1])}<!-- end of table -->", page)


def _table(name: str) -> str:
    section, _, kind = name.partition(".")
    if name in ("engines", "arguments"):
        return f"\n{_engines()}\n\n" if name == "engines" else f"{arguments.table()}\n"
    if name == "recipe":
        return _rows("", Recipe)
    if section == "drafter" and kind in methods():
        return _rows("drafter.", find_drafter(kind).Config)
    parts: dict[str, Any] = {"backbone.lora": Lora, "drafter": DrafterOptions}
    parts |= {"drafter.layer": LayerShape, "drafter.shortlist": ShortlistConfig}
    return _rows(f"{name}.", parts.get(name) or Recipe.model_fields[name].annotation)


def _engines() -> str:
    """Of methods and engines, and the notes below it."""
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


def _rows(prefix: str, model: type[BaseModel]) -> str:
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        values, default = _escaped(describe(field.annotation, field.metadata)), _default(field)
        lines.append(f"| `{prefix}{name}` | {values} | {default} | {_escaped(field.description or '')} |")
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    shown = "see below" if isinstance(field.default, BaseModel) else f"`{_yaml(field.default)}`"
    return "required" if field.is_required() else shown


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_yaml, value))}]"
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _escaped(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), with_tables(Path(sys.argv[1]).read_text("utf-8")))
