"""Read rows of a .jsonl file or lines of a text file, optionally compressed, with line numbers for error messages."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from headstart.support.errors import UserError, cause
from headstart.support.files import require_file
from headstart.support.json_text import parse_json
from headstart.support.text import decode

Row = dict[str, Any]
LINES = (".jsonl", ".ndjson")
"""Endings of files of rows, one a line."""
COMPRESSED = (".gz", ".zst")
"""Endings of compressed files."""
MAX_LINE = 256 << 20
"""Bytes of a line, so that a file without line breaks ends in an error and not in all memory."""


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each non-blank line, without the line break. Raises UserError if the file cannot be read."""
    require_file("the file", file)
    try:
        with open_file(file) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), b""), 1):
                if len(line) > MAX_LINE:
                    raise UserError(f"{file}, line {number} is longer than {MAX_LINE >> 20} MB; give one row a line")
                text = decode(line, f"{file}, line {number}")
                if text.strip():
                    yield number, text.rstrip("\r\n")
    except (OSError, EOFError, zlib.error) as error:   # truncated gzip, no permission
        raise UserError(f"{file} cannot be read: {cause(error)}; check the file") from None


def read_jsonl(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield the line number and row of each line. Raises UserError, naming file and line."""
    for number, line in read_lines(file):
        row = parse_json(line, f"{file}, line {number}")
        if not isinstance(row, dict):
            raise UserError(f"{file}, line {number}: a row is a mapping from column to value; got {type(row).__name__}")
        yield number, row


def open_file(file: Path) -> BinaryIO:
    """Open a file to read its bytes, decompressed if its name ends in .gz or .zst. Raises OSError, also for damaged data when read."""
    if file.suffix == ".zst":
        import pyarrow  # type: ignore[import-untyped]  # here, since only these files need it

        return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd")))
    return cast(BinaryIO, gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb"))
