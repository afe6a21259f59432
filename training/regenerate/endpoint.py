"""Responses from a server of the backbone with an OpenAI-compatible API (vLLM, SGLang, llama.cpp, ...).

Conversations are sent to ``/chat/completions``, plain texts to ``/completions``, with ``regenerate.concurrency`` requests at a time.
Transient failures are retried with exponential back-off.
"""

import random
import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cached_property
from itertools import islice, takewhile
from typing import Any

from headstart.chat.conversation import Chat, begins_twice
from headstart.chat.images import for_server
from headstart.chat.messages import ASSISTANT, Message, image_parts
from headstart.chat.template import TemplateRefusal, template_hash
from headstart.heads.backbone.backbone import load_tokenizer
from headstart.heads.backbone.model_config import read_end_tokens
from headstart.support.errors import UserError
from headstart.support.post import Client, NoProtocol, Passing, Refusal
from headstart.training.data.tokenise import chat_settings
from headstart.training.features.served import KeptFeatures
from headstart.training.recipe.recipe import Recipe
from headstart.training.regenerate.items import Completion, Conversation, Item, Response, failure

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the first retry, doubled for each further one up to the maximum, which also bounds the server's Retry-After."""
BAD_REQUEST = (400, 413, 422)
"""Statuses of a refused request; the item ends with an error."""
TOO_LONG = re.compile(r"context.{0,3}(length|size|window)|too (long|large)|max_model_len|max_new_tokens. must be", re.I)
MAX_REFUSALS = 20
"""Number of refusals without any response after which the run ends, since the requests themselves must be wrong."""
TOKEN_IDS = "return_token_ids"
"""Parameter by which vLLM and SGLang return the token ids of prompt and answer; other servers ignore it, or refuse it by name."""


class Endpoint:
    """Responses from the server at ``regenerate.endpoint``."""

    def __init__(self, recipe: Recipe, keeper: KeptFeatures | None = None) -> None:
        """``keeper``: keeps the answers' hidden states, which the server extracts. Raises UserError without the key; asks nothing."""
        settings = self.settings = recipe.regenerate
        assert settings.endpoint is not None
        self.recipe, self.url = recipe, settings.endpoint.rstrip("/")
        self.model, self.keeper = settings.model or recipe.backbone.path, keeper
        self.client = Client("regenerate", settings.api_key, settings.timeout, settings.concurrency)
        self.stopped, self.lock = threading.Event(), threading.Lock()
        self.extra: dict[str, Any] = {TOKEN_IDS: True}
        """Parameters that not every server knows."""
        self.compared = self.differing = self.with_ids = 0
        """Answers whose text was tokenised here, those whose tokens differed from the written ones, and those with token ids."""
        self._tokenizer: Any = None

    def dependencies(self) -> dict[str, Any]:
        """Return the dependencies of responses besides the common settings: the model, but not the address."""
        return {
            "responses": "from an endpoint",
            "regenerate.model": self.model,
            "regenerate.prompt_tokens": self.settings.prompt_tokens,
            "chat template": template_hash(self.recipe.data.chat_template),
        }

    def respond(self, items: Sequence[Item], wrote: Callable[[int], None]) -> Generator[Item]:
        """Yield each item when it is no longer pending, in any order. ``wrote`` is called with the number of tokens written meanwhile.

        If the server does not answer, raise UserError and cancel pending requests.
        """
        if any(isinstance(item, Completion) for item in items):  # loaded before the threads start; only plain texts need it
            where = self.recipe.backbone
            self._tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
            if not self._tokenizer.is_fast:
                raise UserError(f"the tokenizer of {where.path} is a slow one, which cannot cut a text; take one with a tokenizer.json")
        until = time.monotonic() + self.settings.seconds
        pool, queue = ThreadPoolExecutor(self.settings.concurrency), takewhile(lambda _: time.monotonic() < until, items)
        under_way: set[Future[Item]] = set()
        answered = refused = 0
        try:
            while True:
                more = islice(queue, 2 * self.settings.concurrency - len(under_way))
                under_way |= {pool.submit(self._converse, item) for item in more}
                if not under_way:
                    return
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: future.exception() is not None):  # what was answered is kept
                    item = future.result()
                    wrote(item.tokens)
                    answered, refused = answered + item.turns, refused + (item.error == "refused")
                    if refused >= MAX_REFUSALS and not answered:
                        raise UserError(f"{self.url} refused the first {refused} rows, the last one with {item.detail}")
                    yield item
        finally:
            self.stopped.set()
            pool.shutdown(cancel_futures=True)
            self.client.close()

    def report(self) -> dict[str, Any]:
        """Return how many answers came with token ids, and how many of those compared are tokenised otherwise than they were written."""
        return {"answers_with_token_ids": self.with_ids, "answers_compared": self.compared, "answers_tokenised_otherwise": self.differing}

    def _converse(self, item: Item) -> Item:
        while item.pending:
            try:
                response = self._text(item) if isinstance(item, Completion) else self._message(item)
            except Refusal as refusal:
                response = failure("too_long" if TOO_LONG.search(str(refusal)) else "refused", str(refusal))
            item.add_response(response, self.settings.unfinished)
        return item

    def _message(self, item: Item) -> Response:
        assert isinstance(item, Conversation)
        tools = self.recipe.data.template_kwargs.get("tools") if item.tools is None else item.tools
        variables = {key: value for key, value in self.recipe.data.template_kwargs.items() if key != "tools"}
        given = {"chat_template": self.recipe.data.chat_template, "chat_template_kwargs": variables}  # as vLLM takes them
        prompt = {"messages": for_server(item.messages, f"row {item.row + 1}")} | ({} if tools is None else {"tools": tools})
        prompt |= {key: value for key, value in given.items() if value}
        raw = self._ask("/chat/completions", item, prompt, "message")
        if pictured := bool(image_parts(item.messages)):  # servers may give an image other numbers of tokens than the processor here
            raw = replace(raw, prompt=(), answer=())
        fields = raw.message if isinstance(raw.message, dict) else {}
        kept = {name: fields[name] for name in ("tool_calls", "function_call", "refusal") if fields.get(name)}
        if thoughts := fields.get("reasoning_content") or fields.get("reasoning"):  # servers differ in the name
            kept["reasoning_content"] = thoughts
        content = fields.get("content")
        if not isinstance(content, str | None) or not isinstance(kept.get("reasoning_content", ""), str):
            raise UserError(f"{self.url}/chat/completions {self.client.no_protocol(raw.message)}")
        # Without an answer, the reasoning, which this server does not return, did not end.
        error = "truncated" if content is None and not kept else raw.error
        message = {"role": ASSISTANT, "content": content, **kept}
        if not error and not pictured:
            self._compare(item, message, raw)
        return replace(raw, message=message, error=error)

    def _compare(self, item: Conversation, message: Message, raw: Response) -> None:
        """Count whether tokenising the answer's text gives the tokens that were written, or as many."""
        with self.lock:
            self.with_ids += bool(raw.answer)
            if self.chat is None or not (raw.answer or raw.tokens):
                return
            try:
                made = self.chat.answer([*item.messages, message], item.tools)
            except TemplateRefusal:
                return
            self.compared += 1
            self.differing += made != raw.answer if raw.answer else len(made) != raw.tokens

    @cached_property
    def chat(self) -> Chat | None:
        """The backbone's tokenizer and template, to compare; None if they are not here."""
        where = self.recipe.backbone
        try:
            tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
            return Chat(tokenizer, chat_settings(self.recipe.data, read_end_tokens(where.path, trust_remote_code=where.trust_remote_code)))
        except UserError:
            return None

    def _text(self, item: Completion) -> Response:
        encoding = self._tokenizer(item.text, return_offsets_mapping=True, verbose=False)
        twice = begins_twice(self._tokenizer, encoding["input_ids"])
        ends = [end for _, end in encoding["offset_mapping"][twice:]]
        prompt = item.text[: max(ends[: item.prompt_length(len(ends), self.settings.prompt_tokens)], default=0)]
        if not prompt:
            return failure("empty")
        raw = self._ask("/completions", item, {"prompt": prompt.removeprefix(self._tokenizer.bos_token) if twice else prompt}, "text")
        if not isinstance(raw.message, str | None):
            raise UserError(f"{self.url}/completions {self.client.no_protocol(raw.message)}")
        return replace(raw, message={"content": f"{prompt}{raw.message or ''}"}, error="")

    def _ask(self, path: str, item: Item, prompt: dict[str, Any], part: str) -> Response:
        """Request a response, whose message is ``part`` of the server's answer as it is."""
        settings, seed = self.settings, self.recipe.seed
        sampling = {"temperature": item.temperature(settings, seed), "top_p": settings.top_p, "seed": item.seed(seed) % (1 << 31)}
        filters = {"top_k": settings.top_k} if settings.top_k else {}  # not part of OpenAI's API, so sent only if set
        kept = {} if self.keeper is None else self.keeper.parameters
        request = {"model": self.model, **prompt, **kept, "max_tokens": settings.max_new_tokens, **sampling, **filters}
        try:
            body = self._post(path, request | self.extra)
        except Refusal as refusal:
            if TOKEN_IDS not in str(refusal) or not self.extra:
                raise
            self.extra = {}
            body = self._post(path, request)
        try:
            choice = body["choices"][0]
            tokens = (body.get("usage") or {}).get("completion_tokens") or 0
            if not isinstance(tokens, int) or tokens < 0:
                raise TypeError
            ids = [_token_ids(choice.get("prompt_token_ids") or body.get("prompt_token_ids")), _token_ids(choice.get("token_ids"))]
            prompt_ids, answer_ids = ids if all(ids) else ([], [])
            if self.keeper is not None:
                self.keeper.keep(body, prompt_ids, answer_ids)
            error = "truncated" if choice.get("finish_reason") == "length" else ""
            return Response(choice[part], tokens, error, prompt=prompt_ids, answer=answer_ids)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(f"{self.url}{path} {self.client.no_protocol(body)}") from None

    def _post(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request with retries. Raises Refusal if the server refuses the prompt, UserError if there is no answer."""
        problem, after, url = "", 0.0, f"{self.url}{path}"
        for attempt in range(self.settings.retries + 1):
            if attempt and self.stopped.wait(_pause(attempt, after)):
                break
            try:
                return self.client.post(url, request)
            except NoProtocol as error:
                raise UserError(f"{url} {error}") from None
            except Passing as error:
                problem, after = str(error), error.after
            except Refusal as refusal:
                if refusal.status in BAD_REQUEST:
                    raise
                raise UserError(f"{url} refuses with {refusal}; {self._advice(refusal.status)}") from None
        remedy = "see that it runs, or lower regenerate.concurrency; the same command then goes on from here"
        raise UserError(f"{url} gave no answer in {self.settings.retries + 1} attempts, at last {problem}; {remedy}")

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            return "name the environment variable that holds the key with regenerate.api_key"
        return f"see that regenerate.endpoint is all that stands before /chat/completions (mostly up to /v1) and serves {self.model!r}"


def _token_ids(value: Any) -> list[int]:
    """Return a list of token ids; empty for anything else."""
    return value if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value) else []


def _pause(attempt: int, after: float) -> float:
    """Return the seconds to wait before an attempt, with jitter so that threads do not retry simultaneously."""
    longest = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1))
    return max(longest * random.uniform(0.5, 1), min(after, LONGEST_WAIT))
