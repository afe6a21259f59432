"""The backbone answers by itself, in this process: with trained heads if there are any, and with what drafts without training.

Many rows are decoded at once and their places taken by others as they end. In fp32 a row's answer does not depend on that.
Shape suffix: T positions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import load_backbone, load_tokenizer
from headstart.heads.checkpoint import template_hash
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.measure import Settings, Tally, continue_texts
from headstart.inference.sources.recycling import RecyclingProposer
from headstart.inference.sources.suffix import SuffixProposer
from headstart.support.chat import ASSISTANT, prompt_length
from headstart.support.dtypes import dtype_name
from headstart.support.files import value_hash
from headstart.training.data.conversation import Chat, TemplateRefusal
from headstart.training.recipe.recipe import Recipe
from headstart.training.regenerate.answers import Answer, Asked, Conversation, Passage, failed

WINDOW = 8
"""Prompts of one call for each row decoded at once: a longer queue keeps all rows busy, and a kill loses what was not finished of it."""
PROBE = "answer"


class InProcess:
    """Answers by the recipe's backbone."""

    def __init__(self, recipe: Recipe) -> None:
        """Loads the backbone and heads. Raises UserError for those that cannot be had."""
        self.settings, self.seed, where = recipe.regenerate, recipe.seed, recipe.backbone
        self.tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
        if recipe.data.chat_template is not None:
            self.tokenizer.chat_template = recipe.data.chat_template
        self.backbone = load_backbone(
            where.path, dtype=where.dtype, trust_remote_code=where.trust_remote_code, attention=where.attention
        )
        proposers = (SuffixProposer(), RecyclingProposer())
        self.heads: SpeculativeModel = load(self.settings.heads, self.backbone, tokenizer=self.tokenizer, proposers=proposers)
        self.tally = Tally()
        self._chat: Chat | None = None

    def made(self) -> dict[str, Any]:
        """What answers depend on here, beside the settings of both ways."""
        contract = self.backbone.contract()
        return {
            "answered": "in process",
            "backbone.path": self.backbone.name,
            "backbone weights": value_hash(contract),
            "backbone.dtype": dtype_name(self.backbone.dtype),
            "chat template": template_hash(self.tokenizer),
            "regenerate.prompt_tokens": self.settings.prompt_tokens,
        }

    def finish(self, asked: Sequence[Asked]) -> Generator[Asked]:
        """Each row once it is answered."""
        ready = deque(asked)
        while ready:
            taken = [ready.popleft() for _ in range(min(WINDOW * self.settings.batch_size, len(ready)))]
            self._answer([one for one in taken if one.waits])
            ready.extendleft(one for one in reversed(taken) if one.waits)   # a conversation goes on before another begins
            yield from (one for one in taken if not one.waits)

    def report(self) -> dict[str, Any]:
        """Of what was decoded here: tokens per backbone pass, the backbone's own included."""
        return {"tau": self.tally.tau, "acceptance_per_depth": self.tally.acceptance_per_depth}

    def _answer(self, asked: list[Asked]) -> None:
        """One answer to each."""
        prompts = [self._prompt(one) for one in asked]
        for one, prompt in zip(asked, prompts, strict=True):
            if isinstance(prompt, Answer):
                one.take(prompt)
        put = [(one, prompt) for one, prompt in zip(asked, prompts, strict=True) if isinstance(prompt, Tensor)]
        if put:
            written = self._continue([prompt_T for _, prompt_T in put], [one.seed(self.seed) for one, _ in put])
            for (one, prompt_T), tokens in zip(put, written, strict=True):
                one.take(self._said(one, prompt_T, tokens))

    def _prompt(self, one: Asked) -> Tensor | Answer:
        """What is to be continued, int64 [T]; or why it cannot be."""
        if isinstance(one, Passage):
            ids = self.tokenizer(one.text, verbose=False)["input_ids"]
            ids = ids[: prompt_length(len(ids), self.settings.prompt_tokens)]
        else:
            assert isinstance(one, Conversation)
            try:
                text = self.chat.render(one.messages, one.tools, ask=True)
            except TemplateRefusal as refusal:
                return failed("refused", str(refusal))
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            return failed("nothing")
        context = self.backbone.max_positions
        if context is not None and len(ids) + self.settings.max_new_tokens > context:
            return failed("too_long")
        return torch.tensor(ids, dtype=torch.int64)

    def _continue(self, prompts: list[Tensor], seeds: list[int]) -> list[list[int]]:
        """The tokens written after each."""
        settings = self.settings
        how = Settings(settings.max_new_tokens, settings.temperature, settings.top_k, settings.top_p)
        start = time.perf_counter()
        own = {"batch": settings.batch_size} | ({"eos_token_id": eos} if (eos := sorted(self.ends)) else {})
        output = continue_texts(self.heads, prompts, how, seeds, **own)
        self.tally.wall += time.perf_counter() - start
        self.tally.add(output)
        assert output.accept_lengths is not None
        width = max(map(len, prompts))
        rows = output.sequences[:, width:].tolist()
        return [row[: 1 + sum(lengths)] for row, lengths in zip(rows, output.accept_lengths, strict=True)]

    def _said(self, one: Asked, prompt_T: Tensor, tokens: list[int]) -> Answer:
        ended = tokens[-1] in self.ends
        text = tokens[:-1] if ended else tokens
        if isinstance(one, Passage):
            return Answer({"content": self._text([*prompt_T.tolist(), *text])}, len(tokens))
        return Answer({"role": ASSISTANT, "content": self._text(text)}, len(tokens), "" if ended else "truncated")

    def _text(self, tokens: list[int]) -> str:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @property
    def chat(self) -> Chat:
        """Raises UserError for a tokenizer without a chat template; made when first asked for, since texts need none."""
        self._chat = self._chat or Chat(self.tokenizer)
        return self._chat

    @cached_property
    def ends(self) -> set[int]:
        """Tokens that end an answer: the model's own, the tokenizer's, and in conversations what the template closes an answer with.

        First asked for behind the first prompts, when it is known whether there are conversations.
        """
        own = self.backbone.model.generation_config.eos_token_id
        found = {own} if isinstance(own, int) else set(own or [])
        found |= {self.tokenizer.eos_token_id} - {None}
        return found if self._chat is None else found | closing(self._chat)


def closing(chat: Chat) -> set[int]:
    """The special token a template puts behind an answer, if it does."""
    messages = [{"role": "user", "content": "question"}, {"role": ASSISTANT, "content": PROBE}]
    try:
        text = chat.render(messages)
    except TemplateRefusal:
        return set()
    match = chat.special.search(text, text.rfind(PROBE) + len(PROBE))
    token = chat.tokenizer.convert_tokens_to_ids(match.group()) if match is not None and match.group() else None
    return set() if token is None else {token}
