"""Render conversations with a chat template and find the characters of the assistant's turns, for the loss mask.

A template with ``{% generation %}`` blocks marks the turns itself. For other templates, the assistant's turn i is found by rendering
the conversation twice: up to the turn with the generation prompt, and including the turn. The turn is the part by which the second text
extends the first. It includes the end-of-turn token, but not the line breaks that the template adds after it, since the model never
generates them.

Some templates rewrite earlier turns (they drop a reasoning model's thoughts after the next user turn), so the full text lacks what the
model generated at turn i. Such a conversation becomes one text per assistant turn, with a loss on that last turn: the prompt and
answer as they occur in decoding.
"""
from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from headstart.support.chat import ASSISTANT, Message
from headstart.support.errors import UserError, cause

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TemplateRefusal(Exception):
    """The chat template raised an error for a conversation, for example because roles do not alternate."""


@dataclass(frozen=True)
class Rendered:
    text: str
    spans: tuple[tuple[int, int], ...]
    """Characters with a loss, ``text[start:end]``."""


class Chat:
    """Renders conversations with the tokenizer's chat template, or with ``template`` (Jinja) instead."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        if template is None and tokenizer.chat_template is None:
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path or 'this backbone'} has no chat template, so it cannot write conversations;"
                " set data.chat_template to one, take an instruction-tuned backbone, or train on plain text (a column named text)"
            )
        self.tokenizer = tokenizer
        self.template = template
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special} | set(tokenizer.all_special_tokens)
        self.special = re.compile("|".join(re.escape(text) for text in sorted(special, key=len, reverse=True)) or "(?!)")

    def render(self, messages: Sequence[Message], tools: Any = None, ask: bool = False) -> str:
        """Render a conversation, with ``ask`` followed by the generation prompt. Raises TemplateRefusal."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=self.template, tokenize=False, add_generation_prompt=ask
            )
        except Exception as error:   # a template is a program that comes with a model, and may raise anything
            raise TemplateRefusal(cause(error)) from None
        assert isinstance(text, str)
        return text

    def answers(self, messages: Sequence[Message], where: str, tools: Any = None) -> list[Rendered]:
        """Render a conversation with a loss on the assistant's turns: one text, or one per turn (see above); none without such turns.

        An assistant turn that opens the conversation has no loss; messages after the last assistant turn are dropped.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i > 0]
        if not turns:
            return []
        full = self.render(messages[: turns[-1] + 1], tools)
        spans = self._marked(messages, turns, full, tools)
        if spans is None:
            spans = [span for i in turns if (span := self._span(messages, i, full, tools)) is not None]
            if len(spans) < len(turns):
                return [self._last_turn(messages, i, where, tools) for i in turns]
        return [Rendered(full, tuple(spans))]

    def _marked(self, messages: Sequence[Message], turns: list[int], full: str, tools: Any) -> list[tuple[int, int]] | None:
        """Return the template's ``{% generation %}`` spans.

        None if it has none, if the assistant opens the conversation, or if the template rewrites earlier turns.
        """
        template = self.tokenizer.get_chat_template(self.template, tools)
        if not GENERATION.search(template) or messages[0]["role"] == ASSISTANT:
            return None
        if not all(self._stable(self.render(messages[: i + 1], tools), full) for i in turns[:-1]):
            return None
        _, indices = render_jinja_template(
            conversations=[list(messages[: turns[-1] + 1])], tools=tools, chat_template=template, return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )  # fmt: skip
        return list(indices[0]) or None

    def _last_turn(self, messages: Sequence[Message], i: int, where: str, tools: Any) -> Rendered:
        """Render the conversation up to turn i, with a loss on turn i only."""
        text = self.render(messages[: i + 1], tools)
        span = self._span(messages, i, text, tools)
        if span is None:
            raise UserError(
                f"{where}, turn {i}: the chat template does not write the conversation with this answer as the prompt for it and then"
                " more, so which tokens are the answer is unclear; set data.chat_template to one that does, or data.loss_on=all"
            )
        return Rendered(text, (span,))

    def _span(self, messages: Sequence[Message], i: int, full: str, tools: Any) -> tuple[int, int] | None:
        """Find turn i in the full text; None if the full text does not begin with the conversation up to that turn."""
        start = len(before := self.render(messages[:i], tools, ask=True))
        after = self.render(messages[: i + 1], tools)
        end = self._stable(after, full)
        if not after.startswith(before) or end <= start:
            return None
        turn = full[start:end].rstrip()
        closed = any(match.end() == len(turn) for match in self.special.finditer(turn))
        return start, start + len(turn) if closed else end   # without a closing token, the line break ends the turn

    def _stable(self, after: str, full: str) -> int:
        """Return the length of the prefix of ``full`` that ``after`` covers; 0 if more than closing special tokens differ.

        Some templates add one more special token at the very end.
        """
        if full.startswith(after):
            return len(after)
        common = os.path.commonprefix([after, full])
        end = max((match.end() for match in self.special.finditer(common)), default=0)
        return 0 if self.special.sub("", after[end:]).strip() else end


def encode(tokenizer: PreTrainedTokenizerBase, rendered: Rendered) -> tuple[Tensor, Tensor]:
    """Tokenize; returns token ids and their loss mask, True for tokens that begin inside a span."""
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'this backbone'} is a slow one, which cannot say which characters a token"
            " stands for; take a backbone with a tokenizer.json, or set data.loss_on=all"
        )
    # The template has added the special tokens already.
    encoding = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = torch.tensor([_first(rendered.text, start, end) for start, end in encoding["offset_mapping"]], dtype=torch.int64)
    loss_mask = torch.zeros(len(starts), dtype=torch.bool)
    for start, end in rendered.spans:
        loss_mask |= (start <= starts) & (starts < end)
    return torch.tensor(encoding["input_ids"], dtype=torch.int64), loss_mask


def _first(text: str, start: int, end: int) -> int:
    """Return the start of a token without leading spaces, so that the first word after ``Assistant: `` belongs to the answer.

    Some tokenizers exclude these spaces from the offsets; a token of spaces only then has an empty range at its end.
    """
    if start == end:
        return start - 1
    return end - len(text[start:end].lstrip(" ") or text[start:end])
