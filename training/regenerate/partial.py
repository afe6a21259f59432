"""A dataset on its way to disk: rows appended as they finish, in any order; at the end put in order under the name it was asked for.

``OUT.partial`` begins with a line that says what the rows depend on. A restart reads it, refuses one of something else, drops a last
line that a kill has torn, and goes on with the rows that are missing.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from headstart.support.errors import UserError
from headstart.support.files import atomic, locked

FORMAT = 1
AGAIN = ("too_long", "refused")
"""Faults that may have been the server's settings: a row without any answer for one of them is asked again after a restart."""
Line = dict[str, Any]
"""``row`` (its number in the dataset, from 0), ``turns``, ``tokens``, ``fault``, ``note``, and ``answered``: its columns, or null."""


class Partial:
    """The half-done file of ``out``, locked while it is open. ``made``: what its rows depend on, by name."""

    def __init__(self, out: Path, made: dict[str, Any]) -> None:
        """Raises UserError if ``out`` is there already, or its half-done file is of something else, damaged or in use."""
        self.out, self.path = out, out.with_name(f"{out.name}.partial")
        self.made = json.loads(json.dumps(made))
        self.places: dict[int, int] = {}
        """Row -> where its line begins."""
        self.counts: Counter[str] = Counter()
        """Of all rows so far: turns, tokens, answered ones, and each fault."""
        self.note = ""
        """What was said to the first row that was refused."""
        if out.exists():
            raise UserError(f"regenerate.out={out} is there already; delete it, or choose another name")
        self.lock_path = out.with_name(f".{out.name}.lock")
        with ExitStack() as resources:   # given back here if anything fails
            if not resources.enter_context(locked(self.lock_path, "regenerate.out")):
                raise UserError(f"{self.path} is being written by another process; let it finish, or choose another regenerate.out")
            try:
                self.file: BinaryIO = resources.enter_context(self.path.open("a+b"))
            except OSError as error:
                raise UserError(f"{self.path} cannot be written: {error.strerror}; choose another regenerate.out") from None
            self._read()
            self.resources = resources.pop_all()

    def __enter__(self) -> Partial:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.resources.close()

    def append(self, line: Line) -> None:
        """One row, on disk when this returns (unless the machine itself fails)."""
        self._count(line, self.file.seek(0, os.SEEK_END))
        self.file.write(_encode(line))
        self.file.flush()

    def finish(self) -> int:
        """Write what was answered, in the dataset's order, and give it its name; how many rows. Raises UserError if none."""
        if not self.counts["answered"]:
            self._remove()
            found = ", ".join(f"{self.counts[fault]} {fault}" for fault in ("truncated", "too_long", "refused", "nothing"))
            why = f" (refused: {self.note})" if self.note else ""
            raise UserError(f"no row of {len(self.places)} was answered: {found}{why}; nothing is written to {self.out}")
        with atomic(self.out) as temporary, temporary.open("wb") as rows:
            for row in sorted(self.places):
                self.file.seek(self.places[row])
                answered = json.loads(self.file.readline())["answered"]
                if answered is not None:
                    rows.write(_encode({"row": row} | answered))
        self._remove()
        return self.counts["answered"]

    def _remove(self) -> None:
        """The half-done file and its lock: the dataset is there, or there will be none."""
        self.path.unlink()
        self.lock_path.unlink(missing_ok=True)

    def _read(self) -> None:
        """What is there already. Without a row to keep it is prefill_at anew."""
        self.file.seek(0)
        place = 0
        header: dict[str, Any] = {}
        for number, raw in enumerate(self.file, 1):
            if not raw.endswith(b"\n"):
                self.file.truncate(place)   # torn by a kill
                break
            try:
                line = json.loads(raw)
                if number == 1:
                    header = {"format": line["format"], "made": line["made"]}
                elif line["answered"] is not None or line["fault"] not in AGAIN:
                    self._require(**header)
                    self._count(line, place)
            except UserError:
                raise
            except (ValueError, KeyError, TypeError) as error:
                what = f"{type(error).__name__}: {error}"
                raise UserError(f"{self.path}, line {number} is damaged ({what}); delete the file to begin anew") from None
            place += len(raw)
        if not self.places:
            self.file.truncate(0)
            self.file.write(_encode({"headstart": "regenerate", "format": FORMAT, "made": self.made}))
            self.file.flush()

    def _require(self, format: int, made: dict[str, Any]) -> None:
        if format != FORMAT:
            raise UserError(f"{self.path} is of format {format}; this version writes format {FORMAT}: delete it to begin anew")
        for key in [*self.made, *made]:
            if made.get(key) != self.made.get(key):
                raise UserError(
                    f"{self.path} is half of another dataset: {key} was {made.get(key)!r}, now it is {self.made.get(key)!r}; "
                    "restore that to go on with it, delete the file to begin anew, or choose another regenerate.out"
                )

    def _count(self, line: Line, place: int) -> None:
        """Take note of a row on disk."""
        self.places[line["row"]] = place
        self.counts.update(turns=line["turns"], tokens=line["tokens"], answered=line["answered"] is not None)
        if line["fault"]:
            self.counts[line["fault"]] += 1
        if line["fault"] == "refused":
            self.note = self.note or line["note"]


def _encode(value: dict[str, Any]) -> bytes:
    """A line; half a character, which an endpoint may send, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
