"""Reports as one self-contained HTML page of sections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from headstart.support.terminal import Table

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
