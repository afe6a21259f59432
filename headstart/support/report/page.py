"""Reports as one HTML page that needs nothing else: jinja2 templates (``templates/``), and the data that they render."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headstart.support.report.charts import strip

DARKEST = 8
"""Decoding steps that wrote this many tokens or more have the same colour."""
_environment = Environment(
    loader=PackageLoader("headstart.support.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


@dataclass(frozen=True)
class TableRow:
    """Cells of text, then cells of shares, the darker the larger. ``css``: classes."""

    cells: Sequence[str]
    heat: Sequence[float] = ()
    css: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a page; the column ``left`` is aligned left."""

    titles: Sequence[str]
    rows: Sequence[TableRow]
    left: int = 0


@dataclass(frozen=True)
class TokenRun:
    """The tokens that one decoding step wrote."""

    tokens: Sequence[str]
    title: str

    @property
    def strength(self) -> int:
        """Of its colour."""
        return min(len(self.tokens), DARKEST) - 1


@dataclass(frozen=True)
class Sample:
    """A continuation: the end of its prompt, and the tokens of each decoding step."""

    name: str
    prompt: str
    strip: Markup
    """Its decoding steps as bars."""
    runs: list[TokenRun] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, sample: dict[str, Any], hue: int) -> Sample:
        """``sample``: ``prompt``; ``tokens``, the text of each token; ``accept_lengths``, those of each step after the first token."""
        tokens, place, lengths = sample["tokens"], 1, []
        runs = [TokenRun(tokens[:1], "prefill")]
        for number, length in enumerate(sample["accept_lengths"], 1):
            if place >= len(tokens):
                break
            runs.append(TokenRun(tokens[place : place + length], f"step {number}: {length} {'token' if length == 1 else 'tokens'}"))
            lengths.append(length)
            place += length
        return cls(name, sample["prompt"], strip(lengths, hue), runs)


def render(template: str, **context: Any) -> str:
    """The whole page."""
    return _environment.get_template(template).render(context)
