"""Read a written answer back as a message: the reverse of rendering it.

A template is rendered with marks in place of what a message may hold; what stands around the marks is then looked for in the answer. A
message found so counts only if the template writes it as exactly the answer's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from headstart.support.chat.messages import ASSISTANT, Message
from headstart.support.chat.template import Template, TemplateRefusal
from headstart.support.chat.written import MARK

THOUGHT, NAME, ARGUMENT = "headstartthought", "headstartname", "headstartargument"
ARGUMENTS = json.dumps({ARGUMENT: 1})
ANYTHING = {THOUGHT: "(?P<thought>.+?)", MARK: "(?P<content>.*?)", NAME: r"(?P<name>[\w.-]+)", ARGUMENTS: r"(?P<arguments>\{.*\})"}
"""What may stand in the place of a mark; a further name or mapping belongs to another call."""
MARKS = re.compile("|".join(map(re.escape, ANYTHING)))


def read_answer(template: Template, messages: Sequence[Message], text: str, tools: Any = None) -> Message:
    """Return the message whose rendering after ``messages`` is ``text``, which ends before the token that ended it.

    Thoughts become ``reasoning_content``, and calls ``tool_calls`` where the template would not write them back as content. What it would
    not write back at all stays in ``content``, special tokens included.
    """
    try:
        prompt = template.render(messages, tools, ask=True).text
        for fields in _forms():
            shown = template.render([*messages, {"role": ASSISTANT, **fields}], tools).text
            found = _found(shown[len(prompt) :], text) if shown.startswith(prompt) else None
            if found is not None and template.render([*messages, found], tools).text.startswith(prompt + text):
                return found
    except TemplateRefusal:
        pass
    return {"role": ASSISTANT, "content": text}


def _forms() -> Iterator[Message]:
    """Yield what a message may hold, with marks."""
    for calls in ({}, {"tool_calls": [_call("call00000", NAME, {ARGUMENT: 1})]}):
        for content in ({"content": MARK}, {"content": ""}) if calls else ({"content": MARK},):
            yield {**content, "reasoning_content": THOUGHT, **calls}
            yield {**content, **calls}


def _call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _found(shown: str, text: str) -> Message | None:
    """Return the message whose parts stand in ``text`` as the marks do in ``shown``, up to what follows the last mark."""
    places = [found.span() for found in MARKS.finditer(shown)]
    marks = [shown[start:end] for start, end in places]
    if not marks or len(set(marks)) < len(marks):
        return None
    pieces = [shown[a:b] for a, b in zip([0, *(end for _, end in places)], [start for start, _ in places], strict=False)]
    tail = shown[places[-1][1] :]
    closing = next((size for size in range(len(tail), -1, -1) if text.endswith(tail[:size])), 0) if marks[-1] == ARGUMENTS else 0
    pattern = "".join(re.escape(piece) + ANYTHING[mark] for piece, mark in zip(pieces, marks, strict=True)) + re.escape(tail[:closing])
    match = re.fullmatch(pattern, text, re.DOTALL)
    return None if match is None else _message(match.groupdict())


def _message(parts: dict[str, str]) -> Message | None:
    message: Message = {"role": ASSISTANT, "content": parts.get("content", "")}
    if "thought" in parts:
        message["reasoning_content"] = parts["thought"]
    if "name" in parts:
        try:
            message["tool_calls"] = [_call("call00000", parts["name"], json.loads(parts["arguments"]))]
        except (ValueError, RecursionError):
            return None
    return message
