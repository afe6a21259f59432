"""Reports as one self-contained HTML page: jinja2 templates (``templates/``) and the data they render."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headstart.support.report.charts import strip

DARKEST = 8
"""Number of tokens of a decoding step from which the colour no longer changes."""
_environment = Environment(
    loader=PackageLoader("headstart.support.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


@dataclass(frozen=True)
class TableRow:
    """A row of text cells, then of cells with numbers, shaded darker for larger values (None: empty); ``css``: its classes."""

    cells: Sequence[str]
    heat: Sequence[float | None] = ()
    css: str = ""


@dataclass(frozen=True)
class Table:
    """A table; the columns ``left`` are aligned left, others right. Shaded cells: from ``low``, not shaded, to ``high``."""

    titles: Sequence[str]
    rows: Sequence[TableRow]
    left: Sequence[int] = (0,)
    low: float = 0.0
    high: float = 1.0

    def shade(self, value: float) -> float:
        """The strength of a shaded cell, from 0 to 1."""
        return min(max((value - self.low) / max(self.high - self.low, 1e-9), 0.0), 1.0)


@dataclass(frozen=True)
class TokenRun:
    """The tokens that one decoding step generated."""

    tokens: Sequence[str]
    title: str

    @property
    def strength(self) -> int:
        """Strength of the colour, from 0."""
        return min(len(self.tokens), DARKEST) - 1


@dataclass(frozen=True)
class Sample:
    """A continuation: the end of the prompt and the tokens of each decoding step."""

    name: str
    prompt: str
    strip: Markup
    """Decoding steps as bars."""
    runs: list[TokenRun] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, sample: dict[str, Any], hue: int) -> Sample:
        """Build from a dict with ``prompt``, ``tokens`` (texts) and ``accept_lengths`` (tokens per step, after the first token)."""
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
    """Render a whole page."""
    return _environment.get_template(template).render(context)
