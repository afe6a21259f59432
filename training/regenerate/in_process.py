"""Responses decoded in this process, with trained heads, if any, and with proposers that need no training.

Many rows are decoded together, and new ones join as others end. In fp32 the responses do not depend on batching.
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

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.end_tokens import end_tokens
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.measure import Settings, Tally, continue_texts
from headstart.inference.sources.recycling import RecyclingProposer
from headstart.inference.sources.suffix import SuffixProposer
from headstart.support.chat.conversation import Chat
from headstart.support.chat.messages import prompt_length
from headstart.support.chat.settings import template_hash
from headstart.support.chat.template import TemplateRefusal
from headstart.support.dtypes import dtype_name
from headstart.support.files import value_hash
from headstart.training.data.data import chat_settings
from headstart.training.features.backbone import open_backbone
from headstart.training.recipe.recipe import Recipe
from headstart.training.regenerate.items import Completion, Conversation, Item, Response, failure

CALL_PROMPTS = 8
"""Prompts per call and batch row: a longer queue keeps all rows busy, but a kill loses the whole call."""


class InProcess:
    """Generates responses with the recipe's backbone."""

    def __init__(self, recipe: Recipe) -> None:
        """Loads the backbone and heads. Raises UserError if one cannot be loaded."""
        self.settings, self.seed, where = recipe.regenerate, recipe.seed, recipe.backbone
        self.tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
        self.backbone = open_backbone(where)
        self.chat_settings = chat_settings(recipe.data, end_tokens(self.backbone.model.generation_config))
        self.tokenizer.chat_template = self.chat_settings.template_of(self.tokenizer)
        proposers = (SuffixProposer(), RecyclingProposer())
        self.heads: SpeculativeModel = load(self.settings.heads, self.backbone, tokenizer=self.tokenizer, proposers=proposers)
        self.tally = Tally()

    def dependencies(self) -> dict[str, Any]:
        """Return the dependencies of responses besides the common settings."""
        contract = self.backbone.contract()
        return {
            "responses": "in process",
            "backbone.path": self.backbone.name,
            "backbone weights": value_hash(contract),
            "backbone.adapter": self.backbone.adapter_digest,
            "backbone.dtype": dtype_name(self.backbone.dtype),
            "chat template": template_hash(self.chat_settings.template_of(self.tokenizer)),
            "regenerate.prompt_tokens": self.settings.prompt_tokens,
        }

    def respond(self, items: Sequence[Item]) -> Generator[Item]:
        """Yield each item when it is no longer pending."""
        queue = deque(items)
        while queue:
            taken = [queue.popleft() for _ in range(min(CALL_PROMPTS * self.settings.batch_size, len(queue)))]
            self._respond([item for item in taken if item.pending])
            queue.extendleft(item for item in reversed(taken) if item.pending)   # started conversations go first
            yield from (item for item in taken if not item.pending)

    def report(self) -> dict[str, Any]:
        """Return the mean acceptance length (tau) and the acceptance rate per depth."""
        return {"tau": self.tally.tau, "acceptance_per_depth": self.tally.acceptance_per_depth}

    def _respond(self, items: list[Item]) -> None:
        """Add one response to each item."""
        prompts = [self._prompt(item) for item in items]
        for item, prompt in zip(items, prompts, strict=True):
            if isinstance(prompt, Response):
                item.add_response(prompt)
        prompted = [(item, prompt) for item, prompt in zip(items, prompts, strict=True) if isinstance(prompt, Tensor)]
        for temperature in dict.fromkeys(self.settings.temperatures):
            taken = [(item, prompt_T) for item, prompt_T in prompted if item.temperature(self.settings, self.seed) == temperature]
            if taken:
                written = self._continue([prompt_T for _, prompt_T in taken], [item.seed(self.seed) for item, _ in taken], temperature)
                for (item, prompt_T), tokens in zip(taken, written, strict=True):
                    item.add_response(self._response(item, prompt_T, tokens))

    def _prompt(self, item: Item) -> Tensor | Response:
        """Return the prompt, int64 [T], or an error."""
        if isinstance(item, Completion):
            ids = self.tokenizer(item.text, verbose=False)["input_ids"]
            ids = ids[: prompt_length(len(ids), self.settings.prompt_tokens)]
        else:
            assert isinstance(item, Conversation)
            try:
                ids = self.chat.prompt(item.messages, item.tools)
            except TemplateRefusal as refusal:
                return failure("refused", str(refusal))
        if not ids:
            return failure("empty")
        context = self.backbone.max_positions
        if context is not None and len(ids) + self.settings.max_new_tokens > context:
            return failure("too_long")
        return torch.tensor(ids, dtype=torch.int64)

    def _continue(self, prompts: list[Tensor], seeds: list[int], temperature: float) -> list[list[int]]:
        """Return the tokens generated after each prompt."""
        settings = self.settings
        how = Settings(settings.max_new_tokens, temperature, settings.top_k, settings.top_p)
        start = time.perf_counter()
        own = {"batch_size": settings.batch_size} | ({"eos_token_id": eos} if (eos := sorted(self.ends)) else {})
        output = continue_texts(self.heads, prompts, how, seeds, **own)
        self.tally.wall += time.perf_counter() - start
        self.tally.add(output)
        assert output.accept_lengths is not None
        width = max(map(len, prompts))
        rows = output.sequences[:, width:].tolist()
        return [row[: 1 + sum(lengths)] for row, lengths in zip(rows, output.accept_lengths, strict=True)]

    def _response(self, item: Item, prompt_T: Tensor, tokens: list[int]) -> Response:
        prompt = prompt_T.tolist()
        if isinstance(item, Completion):
            whole = [*prompt, *(tokens[:-1] if tokens[-1] in self.ends else tokens)]
            text = self.tokenizer.decode(whole, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            return Response({"content": text}, len(tokens), prompt=prompt, answer=tokens)
        assert isinstance(item, Conversation)
        error = "" if tokens[-1] in self.ends else "truncated"
        return Response(self.chat.message(item.messages, tokens, item.tools), len(tokens), error, prompt=prompt, answer=tokens)

    @cached_property
    def chat(self) -> Chat:
        """Prompts and answers, needed for conversations only. Raises UserError if there is no chat template."""
        return Chat(self.tokenizer, self.chat_settings)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer. First used after the first prompts are made, when it is known whether there are conversations."""
        if "chat" in self.__dict__:
            return self.chat.ending.ends
        return frozenset(self.chat_settings.ends) or frozenset({self.tokenizer.eos_token_id} - {None})
