"""JSON from files, rows of .jsonl files, and servers, with limits: depth, whole numbers of 64 bits, text of whole characters, and form."""

import base64
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from headstart.support.errors import UserError, cause, naming
from headstart.support.files import require_file
from headstart.support.text import SURROGATE, decode, read_text, require_characters

MAX_DEPTH = 100
"""Levels of lists and mappings inside each other."""
TOO_DEEP = f"nested too deep; lists and mappings may be {MAX_DEPTH} levels deep: flatten it"
MAX_WHOLE = 1 << 63
"""Whole numbers are at least its negative and below it."""
HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape that may be half of a surrogate pair."""


def parse_json(text: str, where: str, whole_characters: bool = True) -> Any:
    """Return the value of a JSON text. Raises UserError, which begins with ``where``, if it is not valid or beyond a limit.

    ``whole_characters`` False: halves of surrogate pairs are kept, for `repaired`.
    """
    with naming(where):
        return _parse(text, whole_characters)


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises UserError, which ends with ``remedy``, if it cannot be read or is something else."""
    file = require_file("", path)
    try:
        value = _parse(read_text("", file))
    except UserError as error:
        raise UserError(f"{file} is damaged ({str(error).removeprefix(f'{file} ')}); {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} is damaged (it holds {_kind(value)} instead of keys and values); {remedy}")
    return value


def log_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a log, as text and as mappings whose ``step``, if any, is a whole number; lines cut off or damaged are left out."""
    for text in path.read_text("utf-8", errors="replace").splitlines():
        try:
            line = parse_json(text, str(path), whole_characters=False)
        except UserError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step", 0), int):
            yield text, line


def _parse(text: str, whole_characters: bool = True) -> Any:
    try:
        value = json.loads(text, parse_int=_whole)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise UserError(f"not valid JSON: {error.msg} ({line}column {error.colno})") from None
    except RecursionError:
        raise UserError(TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        require_depth(value)
    if whole_characters and HALF.search(text):
        for part in (part for level in _levels(value) for part in level if isinstance(part, str)):
            require_characters(part, "a text")
    return value


def require_depth(value: Any, most_values: int | None = None) -> None:
    """Raise UserError if lists and mappings are nested too deep, or hold more than ``most_values`` values."""
    values = 0
    for depth, level in enumerate(_levels(value)):
        values += len(level)
        if depth > MAX_DEPTH:
            raise UserError(TOO_DEEP)
        if most_values is not None and values > most_values:
            raise UserError(f"more than {most_values:,} values; give fewer")


def whole(value: Any) -> Any:
    """Return a whole number that 64 bits hold, and any other value as it is. Raises UserError for a larger one."""
    if isinstance(value, int) and not -MAX_WHOLE <= value < MAX_WHOLE:
        raise UserError("a whole number of more than 64 bits; the largest allowed is 9223372036854775807")
    return value


def repaired(value: Any) -> Any:
    """Return a JSON value with halves of surrogate pairs replaced, for text that no user wrote, such as a model's."""
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [repaired(part) for part in value]
    return {repaired(key): repaired(part) for key, part in value.items()} if isinstance(value, dict) else value


def _whole(digits: str) -> int:
    return int(digits) if len(digits) < 19 else int(whole(int(digits) if len(digits) < 4000 else MAX_WHOLE))


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield the value, what it holds, what that holds, and so on, keys included."""
    level = [value]
    while level:
        yield level
        level = [child for node in level for child in _children(node)]


def _children(node: Any) -> list[Any]:
    return [*node, *node.values()] if isinstance(node, dict) else list(node) if isinstance(node, list | tuple) else []


def _kind(value: Any) -> str:
    names = {str: "a text", list: "a list", bool: "true or false", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


class Form(BaseModel):
    """Keys with values of exactly these types."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


def fault(form: type[Form], value: dict[str, Any]) -> str | None:
    """Name the first key that is missing or of another form; None if there is none."""
    try:
        form.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))} is {'missing' if first['type'] == 'missing' else 'of another form'}"
    return None


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
    except (OSError, EOFError, zlib.error) as error:  # truncated gzip, no permission
        raise UserError(f"{file} cannot be read: {cause(error)}; check the file") from None


def read_jsonl(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield the line number and row of each line. Raises UserError, naming file and line."""
    for number, line in read_lines(file):
        row = parse_json(line, f"{file}, line {number}")
        if not isinstance(row, dict):
            raise UserError(f"{file}, line {number}: a row is a mapping from column to value; got {type(row).__name__}")
        yield number, row


def open_file(file: Path) -> BinaryIO:
    """Open a file to read its bytes, decompressed if they are gzip's or zstd's. Raises OSError, also for damaged data when read.

    What it begins with says so, whatever its name: browsers and scripts compress and decompress without renaming.
    """
    with file.open("rb") as opened:
        begin = opened.read(4)
    if begin == b"\x28\xb5\x2f\xfd":
        import pyarrow  # type: ignore[import-untyped]  # here, since only these files need it

        return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd")))
    return cast(BinaryIO, gzip.open(file, "rb") if begin.startswith(b"\x1f\x8b") else file.open("rb"))


def without_fill(value: Any, level: int = 0) -> Any:
    """Return a row of a table without the nulls inside its columns: a table has one struct for all rows, and fills what a row lacks.
    Pictures become data: URLs.

    ``level``: mappings around the value. The row's own nulls stay, and a turn's content.
    """
    if isinstance(value, list):
        return [without_fill(part, level) for part in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("bytes"), bytes):  # a picture, as `datasets.Image` keeps it
        return f"data:image/png;base64,{base64.b64encode(value['bytes']).decode()}"
    kept = value if level == 0 else ("content", "value") if level == 1 else ()
    return {key: without_fill(part, level + 1) for key, part in value.items() if part is not None or key in kept}
