"""The text that a model writes for an assistant message, after the prompt of decoding.

Mostly a template writes the message as the prompt for it and then more, and that more is the text. Some templates write a message that is
past otherwise than the model wrote it: without its thoughts, without what the generation prompt opens, without blanks at its ends. Then the
text is put together from the message and what the template writes before and after it.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.support.chat.messages import Message
from headstart.support.chat.template import Template, TemplateRefusal

MARK = "headstartanswer"
"""Stands for an answer, to see what a template writes around it."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's thoughts, as transformers knows them."""
TAG = re.compile(r"\s*<([^<>/\s]+)>")
OPENED = re.compile(r"<(\w{3,})>\s*$")
"""A thought that the generation prompt opens."""
CLOSED = re.compile(r"</\w{3,}>\s*$")
"""A thought that the generation prompt opens and closes: the model answers without one."""


@dataclass(frozen=True)
class Written:
    prompt: str
    """The conversation up to the answer, with the generation prompt."""
    text: str
    """What follows the prompt: the answer and what the template writes after it."""
    marked: tuple[tuple[int, int], ...] | None
    """The parts of the text inside ``{% generation %}`` blocks; None if the template has none."""


def written(template: Template, messages: Sequence[Message], tools: Any = None) -> Written:
    """Return prompt and text of the last message, the assistant's. Raises TemplateRefusal."""
    *before, message = messages
    prompt, after = template.render(before, tools, ask=True).text, template.render(messages, tools)
    content, thought = _after_opening(prompt, message), thoughts(message)
    if not after.text.startswith(prompt):
        return _restored(template, messages, tools, prompt, None)
    text, start = after.text[len(prompt) :], len(prompt)
    if content not in text or (thought.strip() not in text and not CLOSED.search(prompt)):
        return _restored(template, messages, tools, prompt, text)
    blocks = tuple((max(first - start, 0), end - start) for first, end in after.marked if end > start)
    return Written(prompt, text, blocks if template.marks(tools) else None)


def thoughts(message: Message) -> str:
    """Return a message's thoughts; empty if there are none."""
    return next((value for name in THOUGHTS if isinstance(value := message.get(name), str)), "")


def _restored(template: Template, messages: Sequence[Message], tools: Any, prompt: str, text: str | None) -> Written:
    """Put the text together. ``text`` is what the template writes after the prompt; None if it does not write the prompt first."""
    *before, message = messages
    content, thought = _after_opening(prompt, message), thoughts(message)
    shown = template.render([*before, message | {"content": MARK}], tools).text
    place = shown.rfind(MARK)
    if place < 0:   # the template leaves content out, as beside a tool call
        return _rest(template, messages, tools, prompt)
    lead, tail = "", shown[place + len(MARK) :]
    common = os.path.commonprefix([prompt, shown[:place]])
    if len(common) >= _turn(template, messages, tools, prompt):   # else it writes earlier messages otherwise: only the rest is known
        lead = shown[len(common) : place]
    if text is not None and _squeezed(content) in _squeezed(text) and _squeezed(thought) in _squeezed(text):
        if lead or text != content.strip() + tail:
            return Written(prompt, text, None)
    if CLOSED.search(prompt) and common != prompt:   # the prompt has closed its thought, so the model writes none
        return Written(prompt, content + tail, None)
    found = TAG.match(lead)
    if found is not None and content.lstrip().startswith(f"<{found.group(1)}>"):   # the content has what the template adds
        lead = ""
    thinking = "" if thought.strip() in lead + content else _thinking(template.source(tools), prompt, thought)
    return Written(prompt, thinking + lead + content + tail, None)


def _rest(template: Template, messages: Sequence[Message], tools: Any, prompt: str) -> Written:
    """Take as the text what the template writes after the beginning that the conversation and the prompt share."""
    after = template.render(messages, tools).text
    common = os.path.commonprefix([prompt, after])
    if len(common) < _turn(template, messages, tools, prompt):
        raise TemplateRefusal("it does not write the conversation with this answer as the prompt for it and then more")
    text = after[len(common) :]
    return Written(prompt, text, None)


def _turn(template: Template, messages: Sequence[Message], tools: Any, prompt: str) -> int:
    """Return where the generation prompt begins."""
    try:
        return len(os.path.commonprefix([prompt, template.render(messages[:-1], tools).text]))
    except TemplateRefusal:
        return 0


def _after_opening(prompt: str, message: Message) -> str:
    """Return a message's content without the tag of a thought that the prompt has opened already."""
    content = message.get("content")
    content = content if isinstance(content, str) else ""
    opened = OPENED.search(prompt)
    if opened is None or not content.lstrip().startswith(f"<{opened.group(1)}>"):
        return content
    blanks = prompt[opened.end(1) + 1 :]
    return content.lstrip()[len(opened.group(1)) + 2 :].removeprefix(blanks)


def _thinking(source: str, prompt: str, thought: str) -> str:
    """Return a thought that the template leaves out as the model writes it; empty if the template knows no thoughts."""
    if (opened := OPENED.search(prompt)) is not None:
        return f"{thought}\n</{opened.group(1)}>\n\n"
    return f"<think>\n{thought}\n</think>\n\n" if "</think>" in source else ""


def _squeezed(text: str) -> str:
    return "".join(text.split())
