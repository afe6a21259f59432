"""Conversations as tokens: the prompts of decoding and the answers as the model writes and ends them.

Training, regeneration, decoding and measuring take theirs from here. A prompt and its answer are tokenised apart and joined, since a
tokenizer may merge across the border, where decoding cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from headstart.support.chat.ending import Ending, find_ending
from headstart.support.chat.messages import ASSISTANT, Message
from headstart.support.chat.pieces import Pieces, tokenise
from headstart.support.chat.reading import read_answer
from headstart.support.chat.settings import ChatSettings
from headstart.support.chat.template import Template, TemplateRefusal
from headstart.support.chat.trace import TokenSample, Trace
from headstart.support.chat.written import Written, written
from headstart.support.errors import UserError

ANCHOR = "\n"
"""Stands before a text that continues another, for tokenizers that add a blank to the beginning of a text."""


@dataclass(frozen=True)
class Turn:
    """An assistant's turn: what the model reads, and what it writes."""

    prompt: list[int]
    answer: list[int]
    labels: list[bool]
    """The tokens of the answer with a loss: all, or those in the template's ``{% generation %}`` blocks."""


class Chat:
    """The chat template of a tokenizer with its settings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ChatSettings | None = None) -> None:
        """Raises UserError if there is no template."""
        self.tokenizer, self.settings = tokenizer, settings or ChatSettings()
        self.template = Template(tokenizer, self.settings)

    def with_variables(self, **variables: Any) -> Chat:
        """Return the same with other variables of the chat template, as ``enable_thinking=False``."""
        return Chat(self.tokenizer, replace(self.settings, variables={**self.settings.variables, **variables}))

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """Return the tokens that decoding begins with. Raises TemplateRefusal."""
        return self.tokens([self.template.render(messages, tools, ask=True).text])[0]

    def answer(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """Return the tokens of the last message as the model writes them after its prompt, the end included. Raises TemplateRefusal."""
        return self._turns([written(self.template, messages, tools)])[0].answer

    def turns(self, messages: Sequence[Message], tools: Any = None) -> list[Turn]:
        """Return all turns of the assistant but one that opens the conversation, which answers nothing. Raises TemplateRefusal."""
        answers = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT and i > 0]
        return self._turns([written(self.template, messages[: i + 1], tools) for i in answers])

    def samples(self, messages: Sequence[Message], tools: Any = None) -> list[TokenSample]:
        """Return the conversation's tokens with a loss on what the model writes: one sample, or several (see `Trace`)."""
        trace = Trace()
        for turn in self.turns(messages, tools):
            trace.add(turn.prompt, turn.answer, turn.labels)
        return trace.samples

    def message(self, messages: Sequence[Message], answer: Sequence[int], tools: Any = None) -> Message:
        """Return the message that the model has written after these, from its tokens (see `read_answer`)."""
        ended = bool(answer) and answer[-1] in self.ending.ends
        body = self.text(answer[:-1] if ended else answer)
        return read_answer(self.template, messages, body, tools, self.text(answer)[len(body) :])

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Tokenise rendered texts; the template has written the special tokens."""
        return tokenise(self.tokenizer, texts)

    def continued(self, texts: list[str]) -> list[list[int]]:
        """Tokenise texts that continue others."""
        return [ids[len(self._anchor) :] for ids in self.tokens([self._before + text for text in texts])]

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens that continue others, special tokens included."""
        before, whole = (
            self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for ids in (self._anchor, [*self._anchor, *tokens])
        )
        return str(whole[len(before) :])

    @cached_property
    def ending(self) -> Ending:
        return find_ending(self.template, self.tokenizer, self.settings.ends, lambda text: self.continued([text])[0])

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(self.tokenizer)

    @cached_property
    def _anchor(self) -> list[int]:
        """Tokens of `ANCHOR` where a text alone is tokenised otherwise than one that follows it; else empty."""
        anchor, alone, after = self.tokens([ANCHOR, "a b", f"{ANCHOR}a b"])
        return anchor if after != anchor + alone and after[: len(anchor)] == anchor else []

    @property
    def _before(self) -> str:
        return ANCHOR if self._anchor else ""

    def _turns(self, answers: list[Written]) -> list[Turn]:
        prompts, texts = self.pieces.tokens([one.prompt for one in answers], self.tokens), self.continued([one.text for one in answers])
        return [self._turn(*parts) for parts in zip(answers, prompts, texts, strict=True)]

    def _turn(self, answer: Written, prompt: list[int], tokens: list[int]) -> Turn:
        ended = self._ended(answer, tokens)
        return Turn(prompt, ended, [True] * len(ended) if answer.marked is None else self._marked(answer, len(ended)))

    def _ended(self, answer: Written, tokens: list[int]) -> list[int]:
        """Return an answer's tokens up to and with its end."""
        if (length := self.ending.length(tokens)) is not None:
            if answer.calls and not self.ending.after.endswith(self.text(tokens[length:])):
                raise TemplateRefusal("it ends the answer before its calls")
            return tokens[:length]
        if answer.calls and self.ending.called:
            return [*tokens, *self.ending.called]
        if (length := self.ending.closed(tokens, lambda rest: not self.text(rest).strip())) is not None:
            return tokens[:length]
        body = answer.text.removesuffix(self.ending.after) if self.ending.after else answer.text
        return [*self.continued([body])[0], *self.ending.closing]

    def _marked(self, answer: Written, length: int) -> list[bool]:
        """Return which tokens of the answer begin in generation blocks."""
        if not self.tokenizer.is_fast:
            raise UserError(
                f"the tokenizer of {self.tokenizer.name_or_path or 'this backbone'} is a slow one, which cannot say which characters a"
                " token stands for, as generation blocks of the chat template need it; take a backbone with a tokenizer.json"
            )
        text = self._before + answer.text
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        starts = [_first(text, start, end) - len(self._before) for start, end in offsets[len(self._anchor) :]]
        labels = [any(first <= start < end for first, end in answer.marked or ()) for start in starts]
        return [*labels[:length], *labels[-1:] * (length - len(labels))]


def _first(text: str, start: int, end: int) -> int:
    """Return the start of a token without leading blanks: some tokenizers exclude them, and a token of blanks only ends where it starts."""
    if start == end:
        return start - 1
    return end - len(text[start:end].lstrip(" ") or text[start:end])
