"""Rows of CSV and TSV files, whose cells are text: conversations, tools and calls as JSON text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from headstart.support.errors import UserError
from headstart.support.json_text import MAX_LINE, Row, open_file
from headstart.support.text import require_characters


def read_table(path: Path, delimiter: str) -> Iterator[Row]:
    """Yield the rows below the line of column names; an empty cell is null, and a cell may have line breaks in quotes.

    Raises UserError, naming file and line, for what is no such table or not UTF-8; OSError as `open_file` does.
    """
    csv.field_size_limit(MAX_LINE)
    with open_file(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        lines = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            yield from _rows(lines, path)
        except csv.Error as error:
            raise UserError(f"{path}, line {lines.line_num}: {error}; write tables with a library, in UTF-8") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text after line {lines.line_num} ({error.reason}); save it as UTF-8") from None


def _rows(lines: Iterator[list[str]], path: Path) -> Iterator[Row]:
    names = next((line for line in lines if line), [])
    if len(set(names)) < len(names) or not all(name.strip() for name in names):
        raise UserError(f"{path}: the first line of a table names its columns, each once; got {', '.join(names)[:100]}")
    for number, line in enumerate((line for line in lines if line), 1):
        if len(line) != len(names):
            raise UserError(f"{path}, row {number} has {len(line)} cells for {len(names)} columns; put text with delimiters in quotes")
        yield {name: require_characters(cell, f"{path}, row {number}") or None for name, cell in zip(names, line, strict=True)}
