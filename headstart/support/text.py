"""Text: from files, from tokens and in standard streams, which may be closed, hold bytes that are no UTF-8 or show no such character."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.support.errors import UserError, cause
from headstart.support.files import require_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed: among them escapes, which can change a terminal's title, colours or clipboard, and marks that
reverse the direction of writing."""


def visible(text: str) -> str:
    """Return the text with control characters written out, as in ``\\x1b[31m``; line breaks and tabs stay."""
    return CONTROL.sub(lambda found: ascii(found.group())[1:-1], text)


def shortened(value: Any) -> str:
    """Return a value as Python writes it, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def gigabytes(size: float) -> str:
    """Format bytes as GB, or as MB below 1 GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


INCOMPLETE = "\ufffd"
"""Replacement character that an incomplete character decodes to."""


class TokenTextStream:
    """Returns the text that each new token adds; a character of several tokens is returned with the last one.

    The last tokens are decoded again with the new one, since many tokenizers write a token's leading space only after another token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = False) -> None:
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.emitted: list[int] = []
        """The last tokens whose text has been returned."""
        self.pending: list[int] = []
        """Tokens whose text has not been returned."""

    def add(self, token: int) -> str:
        """Add a token and return the new complete text."""
        self.pending.append(token)
        text = self._decode(self.emitted + self.pending)
        return "" if text.endswith(INCOMPLETE) else self._emit(text)

    def end(self) -> str:
        """Return the text held back."""
        return self._emit(self._decode(self.emitted + self.pending)) if self.pending else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._decode(self.emitted)) :]
        if new:
            self.emitted, self.pending = self.pending, []
        return new

    def _decode(self, tokens: list[int]) -> str:
        text = self.tokenizer.decode(tokens, skip_special_tokens=self.skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """Return the text of each token, special tokens included; joined, they are the whole text."""
    stream = TokenTextStream(tokenizer)
    texts = [stream.add(token) for token in tokens]
    return [*texts[:-1], texts[-1] + stream.end()] if texts else []


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
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def _try(self, method: str, *texts: str) -> None:
        try:
            getattr(self._stream, method)(*texts)
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
