"""Standard streams: closed ones, bytes that are no UTF-8, and characters that an output cannot show."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headstart.support.errors import UserError
from headstart.support.text import SURROGATE, require_characters

MAX_CHARACTERS = 64 << 20
"""Length of a prompt on standard input."""


def open_streams() -> None:
    """Replace closed standard streams by the null device; show characters that an output cannot encode as escapes."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None or stream.closed:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper):
            # Bytes that are no UTF-8 become halves of surrogate pairs, which the readers below refuse.
            stream.reconfigure(errors="surrogateescape" if name == "stdin" else "backslashreplace")


class _Lasting:
    """A stream that drops what is written once nobody can read it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            self._stream = open(os.devnull, "w", encoding="utf-8")
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._stream = open(os.devnull, "w", encoding="utf-8")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_stderr() -> Iterator[None]:
    """Within this context, what can no longer be written to standard error, whose terminal or reader has gone, is dropped."""
    stream = sys.stderr
    sys.stderr = _Lasting(stream)
    try:
        yield
    finally:
        sys.stderr = stream


def read_input() -> str:
    """Return all of standard input. Raises UserError if it is no text."""
    text = sys.stdin.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"the standard input is longer than {MAX_CHARACTERS:,} characters; give less")
    if not_utf8(text):
        raise UserError("the standard input is not UTF-8 text; convert it to UTF-8")
    return text


def not_utf8(text: str) -> bool:
    """Return True for text of a stream that holds bytes that are no UTF-8."""
    return SURROGATE.search(text) is not None


def require_arguments_text(argv: list[str]) -> None:
    """Raise UserError for a command-line argument that is no text."""
    for number, argument in enumerate(argv, 1):
        if "\0" in argument:
            raise UserError(f"argument {number} holds a null character; remove it")
        require_characters(argument, f"argument {number}")
