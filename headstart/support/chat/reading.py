"""Read a written answer back as a message: the reverse of rendering it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headstart.support.chat.messages import ASSISTANT, Message
from headstart.support.chat.template import Template, TemplateRefusal
from headstart.support.chat.written import MARK

THOUGHT = "headstartthought"
"""Stands for a thought, as `MARK` for the answer."""


def read_answer(template: Template, messages: Sequence[Message], text: str, tools: Any = None) -> Message:
    """Return the message whose rendering after ``messages`` is ``text``, which ends before the token that ended it.

    Thoughts become ``reasoning_content`` where the template writes them around an answer; what it would not write back as it stands, as
    calls of tools in a form of its own, stays in ``content``, special tokens included.
    """
    plain: Message = {"role": ASSISTANT, "content": text}
    try:
        prompt = template.render(messages, tools, ask=True).text
        for fields in ({"content": MARK, "reasoning_content": THOUGHT}, {"content": MARK}):
            found = _found(template.render([*messages, {"role": ASSISTANT, **fields}], tools).text, prompt, text)
            message = None if found is None else {"role": ASSISTANT, **found}
            if message is not None and template.render([*messages, message], tools).text.startswith(prompt + text):
                return message
    except TemplateRefusal:
        pass
    return plain


def _found(shown: str, prompt: str, text: str) -> Message | None:
    """Find content and thought in the text, from a rendering with marks in their places."""
    if not shown.startswith(prompt) or shown.count(MARK) != 1 or shown.count(THOUGHT) > 1:
        return None
    lead, _, _ = shown[len(prompt) :].partition(MARK)
    before, mark, between = lead.partition(THOUGHT)
    pattern = f"{re.escape(before)}(.*?){re.escape(between)}(.*)" if mark else f"{re.escape(lead)}(.*)"
    match = re.fullmatch(pattern, text, re.DOTALL)
    if match is None or (mark and not match.group(1)):
        return None
    return {"content": match.group(2), "reasoning_content": match.group(1)} if mark else {"content": match.group(1)}
