"""Read rows of a .jsonl file or lines of a text file, optionally gzip-compressed, with line numbers for error messages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.support.errors import UserError

Row = dict[str, Any]


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each non-blank line, without the line break. Raises UserError if the file cannot be read."""
    try:
        opened = gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8")
        with opened as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line.rstrip("\r\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:   # truncated gzip, not UTF-8, no permission
        raise UserError(f"{file} cannot be read: {error}") from None


def read_jsonl(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield the line number and row of each line. Raises UserError, naming file and line."""
    for number, line in read_lines(file):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{file}, line {number}: not valid JSON: {error.msg} (column {error.colno})") from None
        if not isinstance(row, dict):
            raise UserError(f"{file}, line {number}: a row is a mapping from column to value; got {type(row).__name__}")
        yield number, row
