"""A conversation as the text its chat template makes of it, and which characters of that text the assistant wrote.

No template is known by name. For the assistant's turn i the template is asked for everything before the turn, opened for
an answer, and for everything up to and including it: the turn is what the second has beyond the first. Its end-of-turn
token belongs to it; line breaks the template puts after that token do not, since the model never writes them.

Some templates rewrite earlier turns (a reasoning model's thoughts are dropped once the user has spoken again), so what
the model wrote at turn i is not part of the whole conversation. Such a conversation becomes one text a turn, each with
its last turn learned: what the model sees and writes when it answers that turn.
"""
from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.support.chat import ASSISTANT, Message
from headstart.support.errors import UserError


class TemplateRefusal(Exception):
    """The chat template itself will not render a conversation (roles that do not alternate, say)."""


@dataclass(frozen=True)
class Rendered:
    text: str
    learn: tuple[tuple[int, int], ...]
    """Runs of characters to learn, ``text[start:end]``."""


class Chat:
    """A tokenizer's way of writing conversations; ``template`` (Jinja) instead of its own, if given."""

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
        """The template's text; with ``ask`` it ends where the assistant's answer begins."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=self.template, tokenize=False, add_generation_prompt=ask
            )
        except (TemplateError, TypeError) as error:   # a TypeError when the template adds text to a null
            raise TemplateRefusal(" ".join(str(error).split())) from None
        assert isinstance(text, str)
        return text

    def whole(self, messages: Sequence[Message], tools: Any = None) -> Rendered:
        """Everything learned, whoever said it."""
        text = self.render(messages, tools)
        return Rendered(text, ((0, len(text)),))

    def answers(self, messages: Sequence[Message], where: str, tools: Any = None) -> list[Rendered]:
        """The assistant's turns learned: one text, or one a turn (see above), or none without such a turn.

        A turn that opens the conversation answers nothing and is not learned; what follows the last one is left out.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i > 0]
        if not turns:
            return []
        full = self.render(messages[: turns[-1] + 1], tools)
        spans = [self._span(messages, i, full, tools) for i in turns]
        found = tuple(span for span in spans if span is not None)
        if len(found) == len(turns):
            return [Rendered(full, found)]
        return [self._alone(messages, i, where, tools) for i in turns]

    def _alone(self, messages: Sequence[Message], i: int, where: str, tools: Any) -> Rendered:
        """The conversation up to turn i, of which turn i is learned."""
        text = self.render(messages[: i + 1], tools)
        span = self._span(messages, i, text, tools)
        if span is None:
            raise UserError(
                f"{where}, turn {i}: the chat template does not write the conversation with this answer as the prompt for it and then"
                " more, so which tokens are the answer is unclear; set data.chat_template to one that does, or data.loss_on=all"
            )
        return Rendered(text, (span,))

    def _span(self, messages: Sequence[Message], i: int, full: str, tools: Any) -> tuple[int, int] | None:
        """Turn i within the full text; None where that does not begin with the turn as it was written at its time."""
        start = len(before := self.render(messages[:i], tools, ask=True))
        after = self.render(messages[: i + 1], tools)
        end = self._stable(after, full)
        if not after.startswith(before) or end <= start:
            return None
        turn = full[start:end].rstrip()
        closed = any(match.end() == len(turn) for match in self.special.finditer(turn))
        return start, start + len(turn) if closed else end   # with no closing token, the line break is what ends the turn

    def _stable(self, after: str, full: str) -> int:
        """How much of ``after`` stands in the full text too; 0 where they differ in more than what closes a text.

        Some templates write one more special token at the very end, wherever that is.
        """
        if full.startswith(after):
            return len(after)
        common = os.path.commonprefix([after, full])
        end = max((match.end() for match in self.special.finditer(common)), default=0)
        return 0 if self.special.sub("", after[end:]).strip() else end


def encode(tokenizer: PreTrainedTokenizerBase, rendered: Rendered) -> tuple[Tensor, Tensor]:
    """Token ids and which of them to learn: those that begin inside a run."""
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'this backbone'} is a slow one, which cannot say which characters a token"
            " stands for; take a backbone with a tokenizer.json, or set data.loss_on=all"
        )
    # The template has already written the special tokens: adding them again would double the first.
    encoding = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = torch.tensor([_first(rendered.text, start, end) for start, end in encoding["offset_mapping"]], dtype=torch.int64)
    learn = torch.zeros(len(starts), dtype=torch.bool)
    for start, end in rendered.learn:
        learn |= (start <= starts) & (starts < end)
    return torch.tensor(encoding["input_ids"], dtype=torch.int64), learn


def _first(text: str, start: int, end: int) -> int:
    """Where a token begins, spaces in front not counted, so that the first word after ``Assistant: `` is the answer's.

    Some tokenizers leave those spaces out of the offsets anyway, and a token of spaces alone empty, at its own end.
    """
    if start == end:
        return start - 1
    return end - len(text[start:end].lstrip(" ") or text[start:end])
