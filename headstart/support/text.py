"""Text from files and other sources: UTF-8, of a limited size, without halves of surrogate pairs."""

from __future__ import annotations

import re
from pathlib import Path

from headstart.support.errors import UserError, cause
from headstart.support.files import require_file

MAX_BYTES = 64 << 20
"""Size of a file that is read whole."""
SURROGATE = re.compile("[\ud800-\udfff]")


def read_text(what: str, path: str | Path, most: int = MAX_BYTES) -> str:
    """Return the contents of a regular UTF-8 file of at most ``most`` bytes. Raises UserError, which begins with ``what`` and the path."""
    file = require_file(what, path)
    what = f"{what} {file}".strip()
    try:
        with file.open("rb") as opened:
            content = opened.read(most + 1)
    except OSError as error:
        raise UserError(f"{what} cannot be read: {error.strerror or cause(error)}; check its permissions") from None
    if len(content) > most:
        raise UserError(f"{what} is too large: at most {most >> 10:,} KB are read; give the right file")
    return decode(content, what)


def decode(content: bytes, where: str) -> str:
    """Decode UTF-8; a byte order mark at the start is dropped. Raises UserError, which begins with ``where``."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = content[error.start]
        raise UserError(f"{where} is not UTF-8 text (byte 0x{byte:02x} at {error.start}); save it as UTF-8") from None


def require_characters(text: str, where: str) -> str:
    """Return the text. Raises UserError for half of a surrogate pair, which no tokenizer and no UTF-8 file can hold."""
    if not text.isascii() and (found := SURROGATE.search(text)):
        half = f"{found.group()!r} at character {found.start()}"
        raise UserError(f"{where} holds half of a surrogate pair ({half}), which is no character; remove or replace it")
    return text
