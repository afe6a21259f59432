"""Render conversations with a chat template exactly as transformers' ``apply_chat_template`` does, text and generation blocks at once.

Two things differ: a tool call's ``arguments`` that are JSON text of a mapping, as servers write them, become the mapping that templates
expect (vLLM does the same), and the date is that of the settings' instant, if they have one. A template that takes no mapping
(DeepSeek's) gets JSON text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from headstart.chat.messages import Message
from headstart.support.errors import UserError, cause
from headstart.support.files import value_hash

Templates = str | dict[str, str]
"""A Jinja chat template, or several by name, as some tokenizers have them (``default``, ``tool_use``)."""


@dataclass(frozen=True)
class ChatSettings:
    template: Templates | None = None
    """The chat template; None: the tokenizer's own."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as ``enable_thinking``; ``tools`` are those of conversations that bring none."""
    ends: tuple[int, ...] = ()
    """Tokens at which decoding stops, the model's ``generation_config.eos_token_id``; empty: the tokenizer's."""
    time: str | None = None
    """The instant, in ISO 8601, that ``strftime_now`` prints; None: the clock's."""

    def template_of(self, tokenizer: PreTrainedTokenizerBase) -> Templates | None:
        """Return the template that conversations are rendered with, if any."""
        own: Templates | None = tokenizer.chat_template
        return own if self.template is None else self.template

    def to_card(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return what a checkpoint keeps of it: everything but the instant."""
        return {"template": self.template_of(tokenizer), "template_kwargs": dict(self.variables), "eos_token_id": list(self.ends)}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> ChatSettings:
        """Read what `to_card` wrote."""
        return cls(card.get("template"), card.get("template_kwargs") or {}, tuple(card.get("eos_token_id") or ()))


def template_hash(template: Templates | None) -> str | None:
    """Hash a chat template; None if there is none."""
    return value_hash(template) if template else None


GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = "strftime_now"
DIRECTIVES = [f"%{letter}" for letter in "aAbBcdfHIjmMpSUwWxXyYzZGuV"] + [f"%-{letter}" for letter in "dmyHIMSj"]
STOPPED = (
    "{% macro strftime_now(format) %}{% set out = namespace(text=format) %}{% for one, value in headstart_clock %}"
    "{% set out.text = out.text.replace(one, value) %}{% endfor %}{{ out.text }}{% endmacro %}\n"
)
"""Stands before a template and shadows transformers' function of that name; its line break is dropped by ``trim_blocks``."""
PROBE: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [
    {"id": "call00000", "type": "function", "function": {"name": "a", "arguments": {"a": "b"}}},
]}]  # fmt: skip
"""A call, to see which arguments a template takes."""


class TemplateRefusal(Exception):
    """The chat template raised an error for a conversation, for example because roles do not alternate."""


@dataclass(frozen=True)
class Rendered:
    text: str
    marked: tuple[tuple[int, int], ...]
    """The characters inside ``{% generation %}`` blocks, ``text[start:end]``."""


class Template:
    """The chat template of a tokenizer or of the settings, with its variables."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ChatSettings) -> None:
        """Raises UserError if there is no template."""
        templates = settings.template_of(tokenizer)
        if not templates:
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path or 'this backbone'} has no chat template, so it cannot write conversations;"
                " set data.chat_template to one, take an instruction-tuned backbone, or train on plain text (a column named text)"
            )
        self.templates: Templates = templates
        self.variables = {**tokenizer.special_tokens_map, **settings.variables}
        self.tools = self.variables.pop("tools", None)
        self.time = settings.time
        self._as_text: dict[str, bool] = {}

    def source(self, tools: Any = None) -> str:
        """Return the Jinja text that renders conversations with these tools."""
        if isinstance(self.templates, str):
            return self.templates
        named = "tool_use" if tools and "tool_use" in self.templates else "default"
        if named not in self.templates:
            raise UserError(f"the chat templates {', '.join(self.templates)} have no default; set data.chat_template to the text of one")
        return self.templates[named]

    def marks(self, tools: Any = None) -> bool:
        """Whether it marks what the model writes by ``{% generation %}`` blocks."""
        return GENERATION.search(self.source(tools)) is not None

    @property
    def prints_date(self) -> bool:
        """Whether a rendering may depend on the clock."""
        sources = [self.templates] if isinstance(self.templates, str) else self.templates.values()
        return any(CLOCK in source for source in sources)

    def arguments(self, tools: Any = None) -> dict[str, Any]:
        """Return the arguments of ``apply_chat_template`` that the settings decide."""
        source = self.source(tools)
        if self.time is None or CLOCK not in source:
            return {"chat_template": source, **self.variables}
        return {"chat_template": STOPPED + source, **self.variables, "headstart_clock": clock(self.time)}

    def render(self, messages: Sequence[Message], tools: Any = None, ask: bool = False) -> Rendered:
        """Render a conversation, with ``ask`` followed by the generation prompt. Raises TemplateRefusal."""
        return self._render(self.plain(messages, tools), tools, ask)

    def plain(self, messages: Sequence[Message], tools: Any = None) -> list[Message]:
        """Return messages as this template expects them (`plain_message`): arguments of calls as JSON text where it takes no mapping."""
        text = any(message.get("tool_calls") for message in messages) and self._takes_text(tools)
        return [plain_message(message, text) for message in messages]

    def _takes_text(self, tools: Any) -> bool:
        source = self.source(tools)
        if source not in self._as_text:
            self._as_text[source] = False
            try:
                self._render(PROBE, tools)
            except TemplateRefusal:
                with suppress(TemplateRefusal):
                    self._render([plain_message(message, True) for message in PROBE], tools)
                    self._as_text[source] = True
        return self._as_text[source]

    def _render(self, messages: list[Message], tools: Any, ask: bool = False) -> Rendered:
        tools, marks = self.tools if tools is None else tools, self.marks(tools)
        try:
            if not messages:
                raise ValueError("the conversation is empty")
            texts, blocks = render_jinja_template(
                conversations=[messages], tools=tools, add_generation_prompt=ask, return_assistant_tokens_mask=marks,
                **self.arguments(tools),
            )  # fmt: skip
        except Exception as error:  # a template is a program that comes with a model, and may raise anything
            raise TemplateRefusal(cause(error)) from None
        return Rendered(texts[0], tuple(blocks[0]) if marks else ())


def clock(time: str) -> list[tuple[str, str]]:
    """Return the directives of ``strftime`` and what each prints at an instant, with ``%%`` set aside first and put back last."""
    instant = datetime.fromisoformat(time)
    return [("%%", "\0"), *((directive, instant.strftime(directive)) for directive in DIRECTIVES), ("\0", "%")]


def plain_message(message: Message, text: bool = False) -> Message:
    """Return the message as templates expect it: no nulls, which transformers drops too, and arguments of calls as mappings.

    ``text``: as JSON text instead, text as it stands.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_call(call, text) for call in calls]
    if isinstance(call := plain.get("function_call"), dict):
        plain["function_call"] = _call(call, text)
    return plain


def _call(call: Any, text: bool) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return call | {"function": _call(function, text)}
    arguments = call.get("arguments")
    if text:
        return call if isinstance(arguments, str) else call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return call
    return call | {"arguments": parsed} if isinstance(parsed, dict) else call
