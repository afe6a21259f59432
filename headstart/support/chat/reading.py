"""Read a written answer back as a message: the reverse of rendering it.

A template is rendered with marks in place of what a message may hold; what stands around the marks is then looked for in the answer. A
message found so counts only if the template writes it as exactly the answer's text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headstart.support.chat.marked import KEY, NAME, THOUGHT, VALUE, Marked
from headstart.support.chat.messages import ASSISTANT, Message
from headstart.support.chat.template import Template, TemplateRefusal
from headstart.support.chat.written import MARK, written

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
