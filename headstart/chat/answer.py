"""The text that a model writes for an assistant message, after the prompt of decoding.

Mostly a template writes the message as the prompt for it and then more, and that more is the text. Some templates write a message that is
past otherwise than the model wrote it: without its thoughts, without what the generation prompt opens, without blanks at its ends. Then the
text is put together from the message and what the template writes before and after it.
"""

import os.path
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from headstart.chat.messages import ASSISTANT, Message, image_parts
from headstart.chat.template import PROBE, Template, TemplateRefusal

MARK = "headstartanswer"
"""Stands for an answer, to see what a template writes around it."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's thoughts, as transformers knows them."""
TAG = re.compile(r"\s*<([^<>/\s]+)>")
OPENED = re.compile(r"<(\w{3,})>\s*$")
"""A thought that the generation prompt opens."""
CLOSED = re.compile(r"</\w{3,}>\s*$")
"""A thought that the generation prompt opens and closes: the model answers without one."""
EMPTY = re.compile(r"<(\w{3,})>(?P<blanks>\s*)</\1>")
"""A thought that the template leaves out."""
PARTIAL = re.compile(r"[<\[][^<>\[\]\s]*$")
"""The beginning of a tag or a special token."""


@dataclass(frozen=True)
class Written:
    prompt: str
    """The conversation up to the answer, with the generation prompt."""
    text: str
    """What follows the prompt: the answer and what the template writes after it."""
    marked: tuple[tuple[int, int], ...] | None
    """The parts of the text inside ``{% generation %}`` blocks; None if the template has none."""
    calls: bool = False
    """Whether it ends with calls of tools."""
    images: int = 0
    """Of the prompt."""


def written(template: Template, messages: Sequence[Message], tools: Any = None) -> Written:
    """Return prompt and text of the last message, the assistant's. Raises TemplateRefusal."""
    return replace(_written(template, messages, tools), calls=bool(messages[-1].get("tool_calls")), images=len(image_parts(messages[:-1])))


def _written(template: Template, messages: Sequence[Message], tools: Any) -> Written:
    *before, message = messages
    prompt = template.render(before, tools, ask=True).text
    if CLOSED.search(prompt):  # the prompt has closed its thought, so the model writes none
        message = {key: value for key, value in message.items() if key not in THOUGHTS}
    messages = [*before, message]
    after, content, thought = template.render(messages, tools), _after_opening(prompt, message), thoughts(message)
    if not after.text.startswith(prompt):
        return _restored(template, messages, tools, prompt, None)
    text, start = after.text[len(prompt) :], len(prompt)
    if (once := _thought_once(text, message, content)) != text:
        return Written(prompt, once, None)
    if content not in text or content != content.strip() or thought.strip() not in text:
        restored = _restored(template, messages, tools, prompt, text)
        if restored.text != text:
            return restored
    blocks = tuple((max(first - start, 0), end - start) for first, end in after.marked if end > start)
    return Written(prompt, text, blocks if template.marks(tools) else None)


def _thought_once(text: str, message: Message, content: str) -> str:
    """Return the text without the tag of a thought, or the empty one, that the template writes before content with a thought of its own.

    ``content`` is the message's after what the prompt has opened.
    """
    whole = message.get("content")
    if isinstance(whole, str) and len(content) < len(whole) and text.startswith(whole.strip()):
        return text[len(whole.lstrip()) - len(content) :]
    empty = EMPTY.match(text)
    twice = empty is not None and content.startswith(f"<{empty.group(1)}>") and text[empty.end() :].startswith(content)
    return text[empty.end() :] if empty is not None and twice else text


def thoughts(message: Message) -> str:
    """Return a message's thoughts; empty if there are none."""
    return next((value for name in THOUGHTS if isinstance(value := message.get(name), str)), "")


def _restored(template: Template, messages: Sequence[Message], tools: Any, prompt: str, text: str | None) -> Written:
    """Put the text together. ``text`` is what the template writes after the prompt; None if it does not write the prompt first."""
    *before, message = messages
    content, thought = _after_opening(prompt, message), thoughts(message)
    called = bool(message.get("tool_calls"))
    shown = template.render([*before, message if called and not content else message | {"content": MARK}], tools).text
    place = shown.rfind(MARK)
    if place < 0:  # a call beside no content, or a template that leaves content out beside one
        return _beside(template, messages, tools, prompt, shown)
    lead, tail = _lead(template, messages, tools, prompt, shown[:place]), shown[place + len(MARK) :]
    if text is not None and _squeezed(content) in _squeezed(text) and _squeezed(thought) in _squeezed(text):
        inside = text[len(lead) : len(text) - len(tail)]
        only = text == lead + inside + tail and inside.strip() == content.strip()  # else the template has split the content
        return Written(prompt, lead + content + tail if only else text, None)
    if CLOSED.search(prompt) and not shown.startswith(prompt):
        return Written(prompt, content + tail, None)
    found = TAG.match(lead)
    if found is not None and content.lstrip().startswith(f"<{found.group(1)}>"):  # the content has what the template adds
        lead = ""
    return Written(prompt, _thoughtful(template.source(tools), prompt, thought, lead, content) + tail, None)


def _beside(template: Template, messages: Sequence[Message], tools: Any, prompt: str, shown: str) -> Written:
    """Take as the text what the template writes after the beginning that the conversation and the prompt share."""
    start = _common(prompt, shown)
    if start < _turn(template, messages, tools, prompt):
        raise TemplateRefusal("it does not write the conversation with this answer as the prompt for it and then more")
    return Written(prompt, _thoughtful(template.source(tools), prompt, thoughts(messages[-1]), shown[start:], ""), None)


def _lead(template: Template, messages: Sequence[Message], tools: Any, prompt: str, shown: str) -> str:
    """Return what the template writes between the prompt and the content; ``shown`` ends before the content."""
    common = _common(prompt, shown)
    if common >= _turn(template, messages, tools, prompt):
        return shown[common:]
    said = messages[-2].get("content")  # it writes earlier messages otherwise: look from the last one on
    ending = prompt[prompt.rfind(said) :] if isinstance(said, str) and said.strip() and said in prompt else ""
    return shown[shown.rfind(ending) + len(ending) :] if ending and ending in shown else ""


def _common(prompt: str, text: str) -> int:
    """Return the length of the beginning that both share, which does not end within a tag or a special token."""
    common = os.path.commonprefix([prompt, text])
    return len(common if common == prompt else PARTIAL.sub("", common))


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


def _thoughtful(source: str, prompt: str, thought: str, lead: str, content: str) -> str:
    """Return lead and content with a thought that neither of them has: in the lead's empty place for it, or before them."""
    if thought.strip() in lead + content:
        return lead + content
    if (empty := EMPTY.search(lead)) is not None:
        middle = empty.start("blanks") + len(empty.group("blanks")) // 2
        return lead[:middle] + thought + lead[middle:] + content
    return _thinking(source, prompt, thought) + lead + content


def _thinking(source: str, prompt: str, thought: str) -> str:
    """Return a thought that the template leaves out as the model writes it; empty if the template knows no thoughts."""
    if (opened := OPENED.search(prompt)) is not None:
        return f"{thought}\n</{opened.group(1)}>\n\n"
    return f"<think>\n{thought}\n</think>\n\n" if "</think>" in source else ""


def _squeezed(text: str) -> str:
    return "".join(text.split())


NEXT = "headstartnext"


@dataclass(frozen=True)
class Ending:
    ends: frozenset[int]
    """Tokens at which decoding stops."""
    closing: tuple[int, ...]
    """Tokens that follow an answer whose rendering has no end, the last one an end; empty where there is none to be found."""
    called: tuple[int, ...]
    """The same after calls of tools: the marker of their results; empty where that is no end."""
    after: str
    """What the template writes after the last answer of a conversation."""
    special: frozenset[int]
    warning: str
    """What is amiss between the model's end-of-sequence tokens and the template; empty if nothing is."""

    def length(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to and with the first end; None without one."""
        end = _first(tokens, self.ends)
        return None if end is None else end + 1

    def closed(self, tokens: Sequence[int], blank: Callable[[list[int]], bool]) -> int | None:
        """Return the number of tokens up to and with a special token that nothing but blanks follows; None without one."""
        last = next((i for i in range(len(tokens), 0, -1) if tokens[i - 1] in self.special), None)
        return last if last is not None and blank(list(tokens[last:])) else None


def find_ending(template: Template, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], encode: Callable[[str], list[int]]) -> Ending:
    """See what the template writes after an answer. ``ends``: the model's end-of-sequence tokens; ``encode``: tokens of text after text.

    An end may be the marker of the next role (GLM-4). Where no end follows an answer, a special token that closes it is what the model
    writes last of it: a label, but no end, as decoding by the model's own configuration runs on past it. It is one only without ``ends``.
    """
    own = frozenset(ends) or frozenset({tokenizer.eos_token_id} - {None})
    asked = [PROBE[0], {"role": ASSISTANT, "content": MARK}]
    after, following = (_after(template, [*asked, *more]) for more in ([], [PROBE[0] | {"content": NEXT}]))
    tokens, ahead, result = (encode(text) for text in (after, following, _result(template)))
    called = tuple(result[: end + 1]) if (end := _first(result, own)) is not None else ()
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = frozenset(added | set(tokenizer.all_special_ids))
    end = _first(tokens, own if ends else own | special)
    if end is not None and tokens[end] in own:
        return Ending(own, tuple(tokens[: end + 1]), called, after, special, "")
    names = ", ".join(f"{token} {tokenizer.decode([token])!r}" for token in sorted(own)) or "none"
    if (end := _first(tokens, special)) is not None:
        return Ending(own if ends else own | {tokens[end]}, tuple(tokens[: end + 1]), called, after, special, (
            f"the chat template closes an answer with token {tokens[end]} {tokenizer.decode([tokens[end]])!r}, at which decoding does not "
            f"stop: the model's end-of-sequence tokens are {names}; set eos_token_id in its generation_config.json"
        ))  # fmt: skip
    end = _first(ahead, own | special)
    if end is not None and ahead[end] in own:
        return Ending(own, tuple(ahead[: end + 1]), called, after, special, "")
    warning = f"the chat template writes no end-of-sequence token of the model ({names}) after an answer, so heads do not learn to end one"
    return Ending(own, (), called, after, special, warning if after or following else "")


def _first(tokens: Sequence[int], those: Set[int]) -> int | None:
    return next((i for i, token in enumerate(tokens) if token in those), None)


def _result(template: Template) -> str:
    """Return what the template writes between a call and its result; empty if it refuses."""
    result = {"role": "tool", "name": "a", "tool_call_id": "call00000", "content": NEXT}
    try:
        texts = [template.render([*PROBE, *more]).text for more in ([], [result])]
    except TemplateRefusal:
        return ""
    return texts[1][len(texts[0]) :].partition(NEXT)[0] if texts[1].startswith(texts[0]) and NEXT in texts[1] else ""


def _after(template: Template, messages: list[Message]) -> str:
    """Return what the template writes after the answer, up to the next question; empty if it refuses."""
    try:
        text = template.render(messages).text
    except TemplateRefusal:
        return ""
    return text[text.rfind(MARK) + len(MARK) :].partition(NEXT)[0] if MARK in text else ""
