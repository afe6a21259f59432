"""Read a written answer back as a message: the reverse of rendering it.

A template is rendered with marks in place of what a message may hold; what stands around the marks is then looked for in the answer. A
message found so counts only if the template writes it as exactly the answer's text.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from headstart.chat.answer import MARK, written
from headstart.chat.messages import ASSISTANT, Message
from headstart.chat.template import Template, TemplateRefusal

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
        elif self.marks and self.marks[-1] == MARK:  # another end, or none: the content goes on to there
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


IDS = ("call0000{0}", "functions.{1}:{0}")
"""Forms of a call's id; Kimi's templates write it in place of the name."""
MOST = 9
"""Calls in one answer that are read."""


def read_answer(template: Template, messages: Sequence[Message], text: str, tools: Any = None, end: str = "") -> Message:
    """Return the message whose rendering after ``messages`` is ``text``, which ends before the token ``end`` that ended it.

    Thoughts become ``reasoning_content``, and calls ``tool_calls``: where there are ``tools``, or where the template would not write them
    back as content. What it would not write back at all stays in ``content``, special tokens included.
    """
    reader = _Reader(template, messages, tools)
    for found in reader.candidates(text, end):
        shown = reader.shown(found)
        if shown is not None and shown.startswith(text + end if end in shown else text):
            return found
    return {"role": ASSISTANT, "content": text}


class _Reader:
    def __init__(self, template: Template, messages: Sequence[Message], tools: Any) -> None:
        self.template, self.messages, self.tools = template, messages, tools

    def shown(self, message: Message) -> str | None:
        """Return what the model writes for a message; None if the template refuses it."""
        try:
            return written(self.template, [*self.messages, message], self.tools).text
        except TemplateRefusal:
            return None

    def candidates(self, text: str, end: str) -> Iterator[Message]:
        """Yield the messages that the answer may be."""
        kinds = [self._calls, self._plain] if self.tools or self.template.tools else [self._plain, self._calls]
        for kind in kinds:
            for fields in kind(text):
                marked = Marked(self.shown({"role": ASSISTANT, **fields}) or "", end)
                if all(f"{NAME}{i}x" in marked.marks for i in range(len(fields.get("tool_calls", ())))):
                    yield from (_message(fields, parts) for parts in marked.read(text, self.tools))

    def _plain(self, text: str) -> Iterator[Message]:
        yield from ({"content": MARK, "reasoning_content": THOUGHT}, {"content": MARK})

    def _calls(self, text: str) -> Iterator[Message]:
        for pairs in (False, True):
            for form in IDS:
                for base in ({"reasoning_content": THOUGHT}, {}):
                    for content in ("", MARK):
                        fields = {"content": content, **base}
                        for count in self._counts(fields, pairs, form, text):
                            yield fields | {"tool_calls": _calls(count, pairs, form)}

    def _counts(self, fields: Message, pairs: bool, form: str, text: str) -> list[int]:
        """Return how many calls the answer may have, by what the template writes between two, which may also stand before the first."""
        shown = self.shown({"role": ASSISTANT, **fields, "tool_calls": _calls(2, pairs, form)})
        between = Marked(shown, "").between() if shown is not None else ""
        found = text.count(between) if between else 0
        return [count for count in (found + 1, found) if 0 < count <= MOST]


def _calls(count: int, pairs: bool, form: str) -> list[dict[str, Any]]:
    """Return calls of marks: arguments that are written as JSON text, or as pairs of key and value."""
    made = []
    for i in range(count):
        name, key = f"{NAME}{i}x", f"{KEY}{i}x"
        arguments = {key: f"{VALUE}{i}x", f"{KEY}{i}y": f"{VALUE}{i}y"} if pairs else {key: 1}
        made.append({"id": form.format(i, name), "type": "function", "function": {"name": name, "arguments": arguments}})
    return made


def _message(fields: Message, parts: dict[str, Any]) -> Message:
    message: Message = {"role": ASSISTANT, "content": parts.get(MARK, "")}
    if THOUGHT in parts:
        message["reasoning_content"] = parts[THOUGHT]
    calls = []
    for i, call in enumerate(fields.get("tool_calls", [])):
        name = parts[f"{NAME}{i}x"]
        function = {"name": name, "arguments": parts.get(f"{KEY}{i}x", {})}
        calls.append({"id": call["id"].replace(f"{NAME}{i}x", name), "type": "function", "function": function})
    return message | ({"tool_calls": calls} if calls else {})
