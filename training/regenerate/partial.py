"""A partially written dataset: rows are appended as they finish, in any order, and finally written to ``OUT`` in order.

``OUT.partial`` begins with a line with the rows' dependencies. A restart rejects a file with other dependencies, drops an incomplete
last line, and continues with the missing rows.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from headstart.support.errors import UserError
from headstart.support.files import atomic, locked
from headstart.support.json_text import parse_json
from headstart.support.text import decode
from headstart.training.regenerate.items import ERRORS

FORMAT = 3
RETRIED = ("too_long", "refused")
"""Errors that may depend on the server's settings; rows without a result because of them are retried after a restart."""
START = b'{"headstart": "regenerate", "format": '
HEADER: dict[str, Any] = {"format": int, "dependencies": dict}
COLUMNS: dict[str, Any] = {"row": int, "turns": int, "tokens": int, "error": str, "detail": str, "result": dict | None}
"""Types of the values of the first line and of the others."""
Line = dict[str, Any]
"""``row`` (index in the dataset), ``turns``, ``tokens``, ``error``, ``detail``, and ``result`` (columns, or null)."""


def begun_with(out: Path) -> dict[str, Any]:
    """Return the dependencies of the partial file of ``out``; empty if there is none that can be read."""
    try:
        with out.with_name(f"{out.name}.partial").open("rb") as file:
            header = json.loads(file.readline())
        return dict(header["dependencies"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class PartialFile:
    """The partial file of ``out``, locked while open; ``dependencies`` are those of its rows, by name."""

    def __init__(self, out: Path, dependencies: dict[str, Any]) -> None:
        """Raises UserError if ``out`` exists, or if the partial file has other dependencies, is damaged or in use."""
        self.out, self.path = out, out.with_name(f"{out.name}.partial")
        self.dependencies = json.loads(json.dumps(dependencies))
        self.offsets: dict[int, int] = {}
        """Row -> offset of its line in the file."""
        self.counts: Counter[str] = Counter()
        """Counts over all rows so far: turns, tokens, ``rows`` with a result, and each error."""
        self.set_aside: dict[str, list[int]] = {error: [] for error in RETRIED}
        """Error -> numbers of the rows without an answer because of it, counted from 1."""
        self.detail = ""
        """Message for the first refused row."""
        if out.exists():
            raise UserError(f"regenerate.out={out} is there already; delete it, or choose another name")
        self.lock_path = out.with_name(f".{out.name}.lock")
        with ExitStack() as resources:  # closed if anything below fails
            if not resources.enter_context(locked(self.lock_path, "regenerate.out")):
                raise UserError(f"{self.path} is being written by another process; let it finish, or choose another regenerate.out")
            try:
                self.file: BinaryIO = resources.enter_context(self.path.open("a+b"))
            except OSError as error:
                raise UserError(f"{self.path} cannot be written: {error.strerror}; choose another regenerate.out") from None
            self._read()
            self.resources = resources.pop_all()

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.resources.close()

    def append(self, line: Line) -> None:
        """Append a row and flush it, so that it survives a kill of the process."""
        self._count(line, self.file.seek(0, os.SEEK_END))
        self.file.write(_encode(line))
        self.file.flush()

    def finish(self) -> int:
        """Write the rows with a result to ``out`` in order; returns their number. Raises UserError if there are none."""
        if not self.counts["rows"]:
            self._remove()
            errors = "; ".join(f"{self.counts[error]} had {text}" for error, text in ERRORS.items() if self.counts[error])
            why = f" ({self.detail})" if self.detail else ""
            raise UserError(f"none of {len(self.offsets)} rows was answered: {errors}{why}; {self.out} is not written")
        with atomic(self.out) as temporary, temporary.open("wb") as rows:
            for row in sorted(self.offsets):
                self.file.seek(self.offsets[row])
                result = json.loads(self.file.readline())["result"]
                if result is not None:
                    rows.write(_encode({"row": row} | result))
        self._remove()
        return self.counts["rows"]

    def _remove(self) -> None:
        self.path.unlink()
        self.lock_path.unlink(missing_ok=True)

    def _read(self) -> None:
        """Read existing lines; start a new file if there is no row to keep."""
        self.file.seek(0)
        offset = 0
        header: dict[str, Any] = {}
        for number, raw in enumerate(self.file, 1):
            if not raw.endswith(b"\n") and (number > 1 or START.startswith(raw[: len(START)])):
                self.file.truncate(offset)  # incomplete after a kill
                break
            line = self._line(raw, number)
            if number == 1:
                header = {"format": line["format"], "dependencies": line["dependencies"]}
            elif line["result"] is not None or line["error"] not in RETRIED:
                self._require(**header)
                self._count(line, offset)
            offset += len(raw)
        if not self.offsets:
            self.file.truncate(0)
            self.file.write(_encode({"headstart": "regenerate", "format": FORMAT, "dependencies": self.dependencies}))
            self.file.flush()

    def _line(self, raw: bytes, number: int) -> Line:
        """Parse a line, the first one the header. Raises UserError if it is damaged."""
        try:
            line = parse_json(decode(raw, "it"), "it")
            for key, kinds in (HEADER if number == 1 else COLUMNS).items():
                if not isinstance(line, dict) or not isinstance(line.get(key, ...), kinds):
                    raise UserError(f"it has no {key} of the right form")
            return dict(line)
        except UserError as error:
            raise UserError(f"{self.path}, line {number} is damaged ({error}); delete the file to begin anew") from None

    def _require(self, format: int, dependencies: dict[str, Any]) -> None:
        if format != FORMAT:
            raise UserError(f"{self.path} is of format {format}; this version writes format {FORMAT}: delete it to begin anew")
        for key in [*self.dependencies, *dependencies]:
            if dependencies.get(key) != self.dependencies.get(key):
                changed = f"{key} was {dependencies.get(key)!r}, now it is {self.dependencies.get(key)!r}"
                remedy = "restore that to go on with it, delete the file to begin anew, or choose another regenerate.out"
                raise UserError(f"{self.path} is a part of another dataset: {changed}; {remedy}")

    def _count(self, line: Line, offset: int) -> None:
        self.offsets[line["row"]] = offset
        self.counts.update(turns=line["turns"], tokens=line["tokens"], rows=line["result"] is not None)
        if line["error"]:
            self.counts[line["error"]] += 1
        if line["error"] in RETRIED and line["result"] is None:
            self.set_aside[line["error"]].append(line["row"] + 1)
        if line["error"] == "refused":
            self.detail = self.detail or line["detail"]


def _encode(value: dict[str, Any]) -> bytes:
    """Encode a line; an unpaired surrogate, which an endpoint may send, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
