"""Conversations as tokens: the prompts of decoding and the answers as the model writes and ends them.

Training, regeneration, decoding and measuring take theirs from here. A prompt and its answer are tokenised apart and joined, since a
tokenizer may merge across the border, where decoding cannot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headstart.chat.answer import Ending, Written, find_ending, written
from headstart.chat.messages import Message, image_parts, is_learned
from headstart.chat.template import ChatSettings, Template, TemplateRefusal
from headstart.support.errors import UserError


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of texts without adding any: what calling the tokenizer gives, a fifth faster where its class changes nothing."""
    if not texts:
        return []
    kind, usual = type(tokenizer), PreTrainedTokenizerFast
    if isinstance(tokenizer, usual) and all(getattr(kind, name) is getattr(usual, name) for name in ("__call__", "_encode_plus")):
        backend = tokenizer.backend_tokenizer
        if backend.truncation is None and backend.padding is None and not tokenizer.split_special_tokens:
            return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]
    return list(tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])


def begins_twice(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> bool:
    """Whether a text has the first token that the tokenizer adds already, as chat templates write it, so that it is there twice."""
    return tokenizer.bos_token_id is not None and list(tokens[:2]) == [tokenizer.bos_token_id] * 2


def begin(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text that continues none, with those that the tokenizer adds, a first token only where the text has none."""
    tokens = list(tokenizer(text, verbose=False)["input_ids"])
    return tokens[begins_twice(tokenizer, tokens) :]


class Pieces:
    """Cuts texts before special tokens.

    A tokenizer takes added tokens out of a text before anything else, and what stands between them has no influence on each other. That
    does not hold for slow tokenizers, nor beside added tokens that take blanks or look at letters around them: these texts stay whole.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content and not token.normalized]
        plain = tokenizer.is_fast and not tokenizer.split_special_tokens
        plain = plain and not any(token.lstrip or token.rstrip or token.single_word for token in tokenizer.added_tokens_decoder.values())
        self.special = {token.content for token in added if token.special} if plain else set()
        longest_first = sorted((token.content for token in added), key=len, reverse=True)  # of two at one place the longer one counts
        self.pattern = re.compile("|".join(map(re.escape, longest_first)))

    def cut(self, text: str) -> list[str]:
        """Return the pieces, which together are the text."""
        starts = [found.start() for found in self.pattern.finditer(text) if found.group() in self.special] if self.special else []
        return [text[first:end] for first, end in pairwise(dict.fromkeys([0, *starts, len(text)]))]

    def tokens(self, texts: Sequence[str], tokenise: Callable[[list[str]], list[list[int]]]) -> list[list[int]]:
        """Return the tokens of texts that share pieces, by the tokens of each piece."""
        cut = [self.cut(text) for text in texts]
        pieces = list(dict.fromkeys(chain.from_iterable(cut)))
        known = dict(zip(pieces, tokenise(pieces), strict=True))
        return [[token for piece in pieces for token in known[piece]] for pieces in cut]


TokenSample = tuple[list[int], list[bool]]
"""Token ids, and True for those that the model wrote."""


class Trace:
    """The turns of one conversation. A prompt that begins with all tokens before it continues their sample, any other begins a new one."""

    def __init__(self) -> None:
        self.samples: list[TokenSample] = []

    def add(self, prompt: Sequence[int], answer: Sequence[int], labels: Sequence[bool] | None = None) -> None:
        """Add a turn; ``labels``: the tokens of the answer that have a loss (None: all)."""
        last = self.samples.pop() if self.samples else ([], [])
        if list(prompt[: len(last[0])]) != last[0]:
            self.samples.append(last)
            last = ([], [])
        new = [False] * (len(prompt) - len(last[1]))
        self.samples.append(([*prompt, *answer], [*last[1], *new, *([True] * len(answer) if labels is None else labels)]))


ANCHOR = "\n"
"""Stands before a text that continues another, for tokenizers that add a blank to the beginning of a text."""


@dataclass(frozen=True)
class Turn:
    """An assistant's turn: what the model reads, and what it writes."""

    prompt: list[int]
    answer: list[int]
    labels: list[bool]
    """The tokens of the answer with a loss: all, or those in the template's ``{% generation %}`` blocks."""


class Continuation:
    """Tokens of texts that continue others, and the other way round."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Tokenise rendered texts; none are added, as a template has written the special ones."""
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
    def _anchor(self) -> list[int]:
        """Tokens of `ANCHOR` where a text alone is tokenised otherwise than one that follows it; else empty."""
        anchor, alone, after = self.tokens([ANCHOR, "a b", f"{ANCHOR}a b"])
        return anchor if after != anchor + alone and after[: len(anchor)] == anchor else []

    @property
    def _before(self) -> str:
        return ANCHOR if self._anchor else ""


class Chat(Continuation):
    """The chat template of a tokenizer with its settings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ChatSettings | None = None) -> None:
        """Raises UserError if there is no template."""
        super().__init__(tokenizer)
        self.settings = settings or ChatSettings()
        self.template = Template(tokenizer, self.settings)

    def with_variables(self, **variables: Any) -> Chat:
        """Return the same with other variables of the chat template, as ``enable_thinking=False``."""
        return Chat(self.tokenizer, replace(self.settings, variables={**self.settings.variables, **variables}))

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """Return the tokens that decoding begins with. Raises TemplateRefusal."""
        return self.asked([(self.template.render(messages, tools, ask=True).text, len(image_parts(messages)))])[0]

    def of(self, messages: Sequence[Message], where: str) -> Chat:
        """Return the same for one conversation, with its images (`ImageChat`). Raises UserError, which begins with ``where``."""
        return self

    def find(self, tokens: Sequence[int]) -> tuple[Any, ...]:
        """Return the images that tokens of the conversation stand for."""
        return ()

    def applied(self, messages: Sequence[Message], tools: Any, **how: bool) -> Any:
        """Return the tokens of a prompt as transformers' own ``apply_chat_template`` gives them."""
        return self.tokenizer.apply_chat_template(
            self.template.plain(messages, tools), tools=tools or self.template.tools, add_generation_prompt=True, return_dict=False,
            **self.template.arguments(tools), **how,
        )  # fmt: skip

    def asked(self, prompts: Sequence[tuple[str, int]]) -> list[list[int]]:
        """Return the tokens of rendered prompts, each with the number of its images."""
        return self.pieces.tokens([text for text, _ in prompts], self.tokens)

    def answer(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """Return the tokens of the last message as the model writes them after its prompt, the end included. Raises TemplateRefusal."""
        return self._turns([written(self.template, messages, tools)])[0].answer

    def turns(self, messages: Sequence[Message], tools: Any = None) -> list[Turn]:
        """Return the assistant's turns that are learned, but one that opens the conversation: it answers none. Raises TemplateRefusal."""
        answers = [i for i, message in enumerate(messages) if i > 0 and is_learned(message)]
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
        from headstart.chat.reading import read_answer  # here, since few calls need it

        return read_answer(self.template, messages, body, tools, self.text(answer)[len(body) :])

    @cached_property
    def ending(self) -> Ending:
        return find_ending(self.template, self.tokenizer, self.settings.ends, lambda text: self.continued([text])[0])

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(self.tokenizer)

    def _turns(self, answers: list[Written]) -> list[Turn]:
        prompts, texts = self.asked([(turn.prompt, turn.images) for turn in answers]), self.continued([turn.text for turn in answers])
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
