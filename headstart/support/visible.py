"""Text that others wrote, made safe for a terminal."""

from __future__ import annotations

import re

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed: among them escapes, which can change a terminal's title, colours or clipboard, and marks that
reverse the direction of writing."""


def visible(text: str) -> str:
    """Return the text with control characters written out, as in ``\\x1b[31m``; line breaks and tabs stay."""
    return CONTROL.sub(lambda found: ascii(found.group())[1:-1], text)
