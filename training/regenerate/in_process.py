"""Responses decoded in this process, with trained heads, if any, and with proposers that need no training.

Many rows are decoded together, and the next one starts when one has ended. In fp32 the responses do not depend on batching.
Shape suffix: T positions.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headstart.chat.conversation import Chat, begin
from headstart.chat.images import ImageFile, make_chat
from headstart.chat.template import TemplateRefusal, template_hash
from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.model_config import end_tokens
from headstart.heads.checkpoint import require_sizes
from headstart.inference.capture.plugin import compile_lacking
from headstart.inference.engine.recycling import RecyclingProposer
from headstart.inference.engine.request import context_of, unknown_token
from headstart.inference.engine.suffix import SuffixProposer
from headstart.inference.generate import SpeculativeModel, load
from headstart.inference.measure import Prompt, Queue, Settings, stream
from headstart.inference.steps import Tally
from headstart.support.devices import dtype_name
from headstart.support.files import value_hash
from headstart.training.data.data import read_images
from headstart.training.data.tokenise import chat_settings
from headstart.training.features.source import LiveFeatures, open_backbone
from headstart.training.recipe.recipe import Recipe
from headstart.training.regenerate.items import Completion, Conversation, Item, Response, failure


class InProcess:
    """Generates responses with the recipe's backbone."""

    def __init__(self, recipe: Recipe, compile_first: bool = False) -> None:
        """Loads the backbone and heads. Raises UserError if one cannot be loaded. ``compile_first``: see `write_answers`."""
        self.settings, self.seed, where = recipe.regenerate, recipe.seed, recipe.backbone
        if self.settings.heads is not None:
            require_sizes(self.settings.heads, where.path, trust_remote_code=where.trust_remote_code)
        self.tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
        self.backbone = open_backbone(where, images=recipe.data.images)
        self.chat_settings = chat_settings(recipe.data, end_tokens(self.backbone.model.generation_config))
        self.tokenizer.chat_template = self.chat_settings.template_of(self.tokenizer)
        self.images = read_images(recipe, self.tokenizer)
        proposers = (SuffixProposer(), RecyclingProposer())
        self.heads: SpeculativeModel = load(self.settings.heads, self.backbone, tokenizer=self.tokenizer, proposers=proposers)
        if compile_first:
            compile_lacking(self.heads, self.settings.batch_size)
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

    def respond(self, items: Sequence[Item], wrote: Callable[[int], None]) -> Generator[Item]:
        """Yield each item when it is no longer pending (see `Endpoint.respond`). Conversations that have started go first."""
        temperatures, start = dict.fromkeys(self.settings.temperatures), time.monotonic()
        for number, temperature in enumerate(temperatures, 1):
            waiting = deque(item for item in items if item.temperature(self.settings, self.seed) == temperature)
            until = start + self.settings.seconds * number / len(temperatures)
            yield from self._respond(waiting, temperature, until, wrote)

    def report(self) -> dict[str, Any]:
        """Return the mean acceptance length (tau) and the acceptance rate per depth."""
        return {"tau": self.tally.tau, "acceptance_per_depth": self.tally.acceptance_per_depth}

    def _respond(self, waiting: deque[Item], temperature: float, until: float, wrote: Callable[[int], None]) -> Generator[Item]:
        """Yield each item of one temperature when it is no longer pending; after ``until`` only those that have started."""
        settings, over = self.settings, list[Item]()  # those that need no answer, or get none

        def take() -> Prompt | None:
            while waiting and (waiting[0].turns or time.monotonic() < until):
                item = waiting.popleft()
                prompt = self._prompt(item) if item.pending else None
                if isinstance(prompt, Prompt):
                    return prompt
                if prompt is not None:
                    item.add_response(prompt)
                over.append(item)
            return None

        ahead = [take()]  # the tokens that end an answer are known after the first prompt is made
        how = Settings(settings.max_new_tokens, temperature, settings.top_k, settings.top_p)
        queue = Queue(how, settings.batch_size, self.ends)
        with contextlib.closing(stream(self.heads, lambda: ahead.pop() if ahead else take(), queue)) as steps:
            for step in steps:
                if step.forward is not None:
                    self.tally.add(step.forward)
                wrote(sum(tokens for _, tokens in step.written))
                for ended in step.ended:
                    item = ended.prompt.key
                    item.add_response(self._response(item, ended.prompt.ids_T, ended.tokens), settings.unfinished)
                    if item.pending:
                        waiting.appendleft(item)
                    else:
                        yield item
                while over:
                    yield over.pop()
        yield from over

    def _prompt(self, item: Item) -> Prompt | Response:
        """Return the prompt or an error. Raises UserError for images that cannot be read."""
        files: tuple[ImageFile, ...] = ()
        if isinstance(item, Completion):
            ids = begin(self.tokenizer, item.text)
            ids = ids[: item.prompt_length(len(ids), self.settings.prompt_tokens)]
        else:
            assert isinstance(item, Conversation)
            try:
                chat = self.chat.of(item.messages, f"row {item.row + 1}")
                ids = chat.prompt(item.messages, item.tools)
                files = chat.find(ids)
            except TemplateRefusal as refusal:
                return failure("refused", str(refusal))
        if not ids:
            return failure("empty")
        context = context_of(self.backbone)
        if context is not None and len(ids) + self.settings.max_new_tokens > context:
            return failure("too_long")
        ids_T = torch.tensor(ids, dtype=torch.int64)
        if unknown := unknown_token(ids_T, self.backbone):
            return failure("refused", unknown)
        return Prompt(ids_T, item.seed(self.seed), item, LiveFeatures(self.backbone, ()).images(ids_T, files))

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
        return make_chat(self.tokenizer, self.chat_settings, self.images)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer. First used after the first prompts are made, when it is known whether there are conversations."""
        if "chat" in self.__dict__:
            return self.chat.ending.ends
        return frozenset(self.chat_settings.ends) or frozenset({self.tokenizer.eos_token_id} - {None})
