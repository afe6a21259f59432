"""A rendered answer with marks in place of its parts: where these parts stand in another answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from headstart.support.chat.written import MARK

THOUGHT, NAME, KEY, VALUE = "headstartthought", "headstartname", "headstartkey", "headstartvalue"
MARKS = re.compile(rf'({THOUGHT}|{MARK}|{NAME}\d+x|\{{"{KEY}\d+x": 1\}}|{KEY}\d+[xy]|{VALUE}\d+[xy])')
A_NAME = re.compile(r"[\w.-]+")


class Marked:
    def __init__(self, shown: str, end: str) -> None:
        """``end``: the token that ends an answer; what the text has after it is of no interest."""
        parts = MARKS.split(shown)
        self.marks = parts[1::2]
        self.around = parts[::2]
        """What stands before, between and after the marks."""
        tail = self.around[-1]
        if end and end in tail:
            self.around[-1] = tail.partition(end)[0]
        elif self.marks and self.marks[-1] == MARK:   # another end, or none: the content goes on to there
            self.around[-1] = ""

    @cached_property
    def sound(self) -> bool:
        """Whether every mark stands there once, with something to tell the parts of pairs by."""
        apart = [text for mark, text in zip(self.marks, self.around[1:-1], strict=False) if mark.startswith((KEY, VALUE))]
        pairs = [mark for mark in self.marks if mark.startswith(KEY)]
        values = [mark for mark in self.marks if mark.startswith(VALUE)]
        return len(set(self.marks)) == len(self.marks) > 0 and all(apart) and len(pairs) == len(values)

    def between(self) -> str:
        """Return what stands before the second call's name; empty without one."""
        second = f"{NAME}1x"
        return self.around[self.marks.index(second)] if second in self.marks else ""

    def read(self, text: str, tools: Any) -> Iterator[dict[str, Any]]:
        """Yield the parts of ``text`` by mark, if it has this form: values of pairs as what they look like, then as text."""
        if not self.sound or not text.startswith(self.around[0]) or not text.endswith(self.around[-1]):
            return
        for typed in (True, False) if any(mark.startswith(VALUE) for mark in self.marks) else (False,):
            found = _Reading(self, text, tools if typed else None, typed).parts()
            if found is not None:
                yield found


class _Reading:
    """One reading of a text from its beginning to its end."""

    def __init__(self, marked: Marked, text: str, tools: Any, typed: bool) -> None:
        self.marked, self.text, self.typed = marked, text, typed
        self.place, self.end = len(marked.around[0]), len(text) - len(marked.around[-1])
        self.types = {
            (tool.get("function", tool).get("name"), name): spec.get("type")
            for tool in tools or [] for name, spec in _properties(tool).items() if isinstance(spec, dict)
        }  # fmt: skip

    def parts(self) -> dict[str, Any] | None:
        found: dict[str, Any] = {}
        called, marks, around = "", self.marked.marks, self.marked.around
        for i, mark in enumerate(marks):
            last = i == len(marks) - 1
            if mark.startswith("{"):
                value: Any = self._json()
                key = mark[2:].partition('"')[0]
            elif mark.startswith((KEY, VALUE)):
                if not mark.startswith(KEY) or not mark.endswith("x"):
                    continue
                value, key = self._pairs(called, around[i + 1 : i + 5], i + 3 == len(marks) - 1), mark
                i, last = i + 3, i + 3 == len(marks) - 1
            else:
                value, key = self._until("" if last else around[i + 1]), mark
                called = value or "" if mark.startswith(NAME) else called
            if value is None or (mark == THOUGHT and not value) or (mark.startswith(NAME) and not A_NAME.fullmatch(value)):
                return None
            found[key] = value
            if not last and not self._skip(around[i + 1]):
                return None
        return found if self.place == self.end else None

    def _skip(self, literal: str) -> bool:
        self.place += len(literal)
        return self.text.startswith(literal, self.place - len(literal)) and self.place <= self.end

    def _until(self, literal: str) -> str | None:
        """Return the text up to a literal, or to the end if that is empty."""
        start, place = self.place, self.text.find(literal, self.place, self.end) if literal else self.end
        self.place = max(place, start)
        return self.text[start:place] if place >= start else None

    def _json(self) -> dict[str, Any] | None:
        try:
            value, self.place = json.JSONDecoder().raw_decode(self.text, self.place)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def _pairs(self, called: str, around: list[str], last: bool) -> dict[str, Any] | None:
        """Read pairs; ``around``: what stands after a key, between pairs, after another key, and after all."""
        middle, apart, _, close = around
        pairs: dict[str, Any] = {}
        while True:
            key = self._until(middle)
            if key is None or not A_NAME.fullmatch(key) or not self._skip(middle):
                return None
            closed = self.end if last else self.text.find(close, self.place, self.end)
            following = self.text.find(apart, self.place, closed)
            place = closed if following < 0 else following
            if place < self.place:
                return None
            pairs[key], self.place = self._typed(self.text[self.place : place], called, key), place
            if following < 0:
                return pairs
            self._skip(apart)

    def _typed(self, raw: str, called: str, key: str) -> Any:
        if not self.typed or self.types.get((called, key)) == "string":
            return raw
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            return raw


def _properties(tool: Any) -> dict[str, Any]:
    parameters = tool.get("function", tool).get("parameters") or {}
    return parameters.get("properties") or {}
