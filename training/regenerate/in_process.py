"""Responses decoded in this process, with trained heads, if any, and with proposers that need no training.

Many rows are decoded together, and the next one starts when one has ended. In fp32 the responses do not depend on batching.
Shape suffix: T positions.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.checkpoint import template_hash
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.measure import Settings, Tally
from headstart.inference.sources.recycling import RecyclingProposer
from headstart.inference.sources.suffix import SuffixProposer
from headstart.inference.stream import Prompt, Queue, stream
from headstart.support.chat import ASSISTANT, prompt_length
from headstart.support.dtypes import dtype_name
from headstart.support.files import value_hash
from headstart.training.data.conversation import Chat, TemplateRefusal
from headstart.training.features.backbone import open_backbone
from headstart.training.recipe.recipe import Recipe
from headstart.training.regenerate.items import Completion, Conversation, Item, Response, failure

PROBE = "answer"


class InProcess:
    """Generates responses with the recipe's backbone."""

    def __init__(self, recipe: Recipe) -> None:
        """Loads the backbone and heads. Raises UserError if one cannot be loaded."""
        self.settings, self.seed, where = recipe.regenerate, recipe.seed, recipe.backbone
        self.tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
        if recipe.data.chat_template is not None:
            self.tokenizer.chat_template = recipe.data.chat_template
        self.backbone = open_backbone(where)
        proposers = (SuffixProposer(), RecyclingProposer())
        self.heads: SpeculativeModel = load(self.settings.heads, self.backbone, tokenizer=self.tokenizer, proposers=proposers)
        self.tally = Tally()
        self._chat: Chat | None = None

    def dependencies(self) -> dict[str, Any]:
        """Return the dependencies of responses besides the common settings."""
        contract = self.backbone.contract()
        return {
            "responses": "in process",
            "backbone.path": self.backbone.name,
            "backbone weights": value_hash(contract),
            "backbone.adapter": self.backbone.adapter_digest,
            "backbone.dtype": dtype_name(self.backbone.dtype),
            "chat template": template_hash(self.tokenizer),
            "regenerate.prompt_tokens": self.settings.prompt_tokens,
        }

    def respond(self, items: Sequence[Item], wrote: Callable[[int], None]) -> Generator[Item]:
        """See `Responder`. Conversations that have started go first."""
        for temperature in dict.fromkeys(self.settings.temperatures):
            waiting = deque(item for item in items if item.temperature(self.settings, self.seed) == temperature)
            yield from self._respond(waiting, temperature, wrote)

    def report(self) -> dict[str, Any]:
        """Return the mean acceptance length (tau) and the acceptance rate per depth."""
        return {"tau": self.tally.tau, "acceptance_per_depth": self.tally.acceptance_per_depth}

    def _respond(self, waiting: deque[Item], temperature: float, wrote: Callable[[int], None]) -> Generator[Item]:
        """Yield each item of one temperature when it is no longer pending."""
        settings, failed = self.settings, list[Item]()

        def take() -> Prompt | None:
            while waiting:
                item = waiting.popleft()
                if isinstance(prompt := self._prompt(item), Tensor):
                    return Prompt(prompt, item.seed(self.seed), item)
                item.add_response(prompt)
                failed.append(item)
            return None

        ahead = [take()]   # the tokens that end an answer are known after the first prompt is made
        how = Settings(settings.max_new_tokens, temperature, settings.top_k, settings.top_p)
        queue = Queue(how, settings.batch_size, frozenset(self.ends))
        with contextlib.closing(stream(self.heads, lambda: ahead.pop() if ahead else take(), queue)) as steps:
            for step in steps:
                if step.forward is not None:
                    self.tally.add_pass(step.forward)
                wrote(sum(tokens for _, tokens in step.written))
                for ended in step.ended:
                    item = ended.prompt.key
                    item.add_response(self._response(item, ended.prompt.ids_T, ended.tokens), settings.unfinished)
                    if item.pending:
                        waiting.appendleft(item)
                    else:
                        yield item
                while failed:
                    yield failed.pop()
        yield from failed

    def _prompt(self, item: Item) -> Tensor | Response:
        """Return the prompt, int64 [T], or an error."""
        if isinstance(item, Completion):
            ids = self.tokenizer(item.text, verbose=False)["input_ids"]
            ids = ids[: prompt_length(len(ids), self.settings.prompt_tokens)]
        else:
            assert isinstance(item, Conversation)
            try:
                text = self.chat.render(item.messages, item.tools, ask=True)
            except TemplateRefusal as refusal:
                return failure("refused", str(refusal))
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            return failure("empty")
        context = self.backbone.max_positions
        if context is not None and len(ids) + self.settings.max_new_tokens > context:
            return failure("too_long")
        return torch.tensor(ids, dtype=torch.int64)

    def _response(self, item: Item, prompt_T: Tensor, tokens: list[int]) -> Response:
        ended = tokens[-1] in self.ends
        text = tokens[:-1] if ended else tokens
        if isinstance(item, Completion):
            return Response({"content": self._text([*prompt_T.tolist(), *text])}, len(tokens))
        return Response({"role": ASSISTANT, "content": self._text(text)}, len(tokens), "" if ended else "truncated")

    def _text(self, tokens: list[int]) -> str:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @property
    def chat(self) -> Chat:
        """The chat template, required only for conversations. Raises UserError if the tokenizer has none."""
        self._chat = self._chat or Chat(self.tokenizer)
        return self._chat

    @cached_property
    def ends(self) -> set[int]:
        """Tokens that end an answer: the model's and tokenizer's EOS tokens and, in conversations, the template's closing token.

        First used after the first prompts are made, when it is known whether there are conversations.
        """
        own = self.backbone.model.generation_config.eos_token_id
        found = {own} if isinstance(own, int) else set(own or [])
        found |= {self.tokenizer.eos_token_id} - {None}
        return found if self._chat is None else found | closing(self._chat)


def closing(chat: Chat) -> set[int]:
    """Return the special token that the template adds after an answer, if any."""
    messages = [{"role": "user", "content": "question"}, {"role": ASSISTANT, "content": PROBE}]
    try:
        text = chat.render(messages)
    except TemplateRefusal:
        return set()
    match = chat.special.search(text, text.rfind(PROBE) + len(PROBE))
    token = chat.tokenizer.convert_tokens_to_ids(match.group()) if match is not None and match.group() else None
    return set() if token is None else {token}
