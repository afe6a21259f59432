"""Conversations rendered by a chat template, and which characters of the text the assistant wrote (the loss mask).

A template with ``{% generation %}`` blocks marks them itself. For any other, the assistant's turn i is found by rendering the
conversation twice: everything before the turn with the generation prompt, and everything up to and including it. The turn is what the
second text has beyond the first. Its end-of-turn token belongs to it; line breaks that the template adds after that token do not, since
the model never writes them.

Some templates rewrite earlier turns (a reasoning model's thoughts are dropped once the user has spoken again), so what the model wrote
at turn i is not in the full text. Such a conversation becomes one text per turn, with a loss on its last turn: what the model reads and
writes when it answers that turn.
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
from transformers.utils.chat_template_utils import render_jinja_template

from headstart.support.chat import ASSISTANT, Message
from headstart.support.errors import UserError

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TemplateRefusal(Exception):
    """The chat template raises an error for a conversation (for roles that do not alternate, say)."""


@dataclass(frozen=True)
class Rendered:
    text: str
    spans: tuple[tuple[int, int], ...]
    """Characters with a loss, ``text[start:end]``."""


class Chat:
    """Renders conversations by a tokenizer's chat template, or by ``template`` (Jinja) in its place."""

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
        """The template's text, with ``ask`` followed by the generation prompt. Raises TemplateRefusal."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=self.template, tokenize=False, add_generation_prompt=ask
            )
        except (TemplateError, TypeError) as error:   # a TypeError when the template adds text to a null
            raise TemplateRefusal(" ".join(str(error).split())) from None
        assert isinstance(text, str)
        return text

    def answers(self, messages: Sequence[Message], where: str, tools: Any = None) -> list[Rendered]:
        """The conversation with a loss on the assistant's turns: one text, or one per turn (see above), or none without such a turn.

        A turn that opens the conversation answers nothing and has no loss; what follows the last one is left out.
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
        """The template's own ``{% generation %}`` spans; None where it has none, or where they would include what they should not.

        That is an opening turn, and earlier turns that the template rewrites.
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
        """The conversation up to turn i, with a loss on turn i alone."""
        text = self.render(messages[: i + 1], tools)
        span = self._span(messages, i, text, tools)
        if span is None:
            raise UserError(
                f"{where}, turn {i}: the chat template does not write the conversation with this answer as the prompt for it and then"
                " more, so which tokens are the answer is unclear; set data.chat_template to one that does, or data.loss_on=all"
            )
        return Rendered(text, (span,))

    def _span(self, messages: Sequence[Message], i: int, full: str, tools: Any) -> tuple[int, int] | None:
        """Where turn i stands in the full text; None if the full text does not begin with the conversation up to that turn."""
        start = len(before := self.render(messages[:i], tools, ask=True))
        after = self.render(messages[: i + 1], tools)
        end = self._stable(after, full)
        if not after.startswith(before) or end <= start:
            return None
        turn = full[start:end].rstrip()
        closed = any(match.end() == len(turn) for match in self.special.finditer(turn))
        return start, start + len(turn) if closed else end   # with no closing token, the line break is what ends the turn

    def _stable(self, after: str, full: str) -> int:
        """Length of the prefix that ``after`` shares with the full text; 0 if they differ in more than a closing special token.

        Some templates write one more special token at the very end.
        """
        if full.startswith(after):
            return len(after)
        common = os.path.commonprefix([after, full])
        end = max((match.end() for match in self.special.finditer(common)), default=0)
        return 0 if self.special.sub("", after[end:]).strip() else end


def encode(tokenizer: PreTrainedTokenizerBase, rendered: Rendered) -> tuple[Tensor, Tensor]:
    """Token ids and their loss mask: tokens that begin inside a span."""
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path or 'this backbone'} is a slow one, which cannot say which characters a token"
            " stands for; take a backbone with a tokenizer.json, or set data.loss_on=all"
        )
    # The template has already written the special tokens: adding them again would double the first.
    encoding = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = torch.tensor([_first(rendered.text, start, end) for start, end in encoding["offset_mapping"]], dtype=torch.int64)
    loss_mask = torch.zeros(len(starts), dtype=torch.bool)
    for start, end in rendered.spans:
        loss_mask |= (start <= starts) & (starts < end)
    return torch.tensor(encoding["input_ids"], dtype=torch.int64), loss_mask


def _first(text: str, start: int, end: int) -> int:
    """Where a token begins, not counting leading spaces: the first word after ``Assistant: `` belongs to the answer.

    Some tokenizers leave those spaces out of the offsets already, and give a token of spaces alone an empty range at its end.
    """
    if start == end:
        return start - 1
    return end - len(text[start:end].lstrip(" ") or text[start:end])
