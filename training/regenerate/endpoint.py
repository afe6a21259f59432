"""The backbone answers from a server: any endpoint that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, ...).

Conversations go to ``/chat/completions``, texts to ``/completions``; as many requests at once as ``regenerate.concurrency``. What is
busy or broken for a while is asked again, each time after a longer wait.
"""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any

import httpx2

from headstart.heads.backbone.backbone import load_tokenizer
from headstart.support.chat import ASSISTANT, prompt_length
from headstart.support.errors import UserError
from headstart.training.recipe.recipe import Recipe
from headstart.training.regenerate.answers import Answer, Asked, Conversation, Passage, failed

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the first retry, doubled for each further one, and at most; a Retry-After of the server's is kept to within the same."""
PASSING = (408, 409, 425, 429)
"""Besides 500 and above: what may go better later."""
ROWS_FAULT = (400, 413, 422)
"""What a server says of a request that it won't answer: that one row is left out."""
TOO_LONG = re.compile(r"context.{0,3}(length|size|window)|too (long|large)|max_model_len|max_new_tokens. must be", re.I)
PATIENCE = 20
"""After so many refusals and not one answer it is not the rows' fault."""


class Refused(Exception):
    """The server won't answer this prompt; the message says why."""


class Endpoint:
    """Answers by what runs at ``regenerate.endpoint``."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises UserError for a key that is not in the environment. Nothing is sent yet."""
        settings = self.settings = recipe.regenerate
        assert settings.endpoint is not None
        self.recipe, self.url = recipe, settings.endpoint.rstrip("/")
        self.model = settings.model or recipe.backbone.path
        key = None if settings.api_key is None else os.environ.get(settings.api_key)
        if settings.api_key is not None and not key:
            raise UserError(f"regenerate.api_key={settings.api_key} names no environment variable that is set; set it, or null for no key")
        self.client = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=settings.timeout,
            limits=httpx2.Limits(max_connections=settings.concurrency),
        )
        self.stopped = threading.Event()
        self._tokenizer: Any = None

    def made(self) -> dict[str, Any]:
        """What answers depend on here, beside the settings of both ways: the address may change, the model may not."""
        return {"answered": "by an endpoint", "regenerate.model": self.model, "regenerate.prompt_tokens": self.settings.prompt_tokens}

    def finish(self, asked: Sequence[Asked]) -> Generator[Asked]:
        """Each row once it is answered. Raises UserError when the server gives no answer, and lets go of what is under way."""
        if any(isinstance(one, Passage) for one in asked):   # threads share it; only texts are cut by tokens
            where = self.recipe.backbone
            self._tokenizer = load_tokenizer(where.path, trust_remote_code=where.trust_remote_code)
            if not self._tokenizer.is_fast:
                raise UserError(f"the tokenizer of {where.path} is a slow one, which cannot cut a text; take one with a tokenizer.json")
        pool, queue = ThreadPoolExecutor(self.settings.concurrency), iter(asked)
        under_way: set[Future[Asked]] = set()
        answered = refused = 0
        try:
            while True:
                more = islice(queue, 2 * self.settings.concurrency - len(under_way))
                under_way |= {pool.submit(self._converse, one) for one in more}
                if not under_way:
                    return
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for one in (future.result() for future in done):
                    answered, refused = answered + one.turns, refused + (one.fault == "refused")
                    if refused >= PATIENCE and not answered:
                        raise UserError(f"{self.url} refused the first {refused} rows, the last one with {one.note}")
                    yield one
        finally:
            self.stopped.set()
            pool.shutdown(cancel_futures=True)
            self.client.close()

    def report(self) -> dict[str, Any]:
        return {}

    def _converse(self, one: Asked) -> Asked:
        """All answers of one row, one after the other."""
        while one.waits:
            try:
                answer = self._text(one) if isinstance(one, Passage) else self._message(one)
            except Refused as refusal:
                answer = failed("too_long" if TOO_LONG.search(str(refusal)) else "refused", str(refusal))
            one.take(answer)
        return one

    def _message(self, one: Asked) -> Answer:
        assert isinstance(one, Conversation)
        asks = {"messages": one.messages} | ({} if one.tools is None else {"tools": one.tools})
        said, tokens, cut = self._choice("/chat/completions", one, asks, "message")
        given = said if isinstance(said, dict) else {}
        kept = {name: given[name] for name in ("tool_calls", "function_call", "refusal") if given.get(name)}
        if thoughts := given.get("reasoning_content") or given.get("reasoning"):   # two names of one thing
            kept["reasoning_content"] = thoughts
        content = given.get("content")
        if content is None and not kept:
            cut = True   # nothing was said: thoughts that did not end, where the server keeps them to itself
        return Answer({"role": ASSISTANT, "content": content, **kept}, tokens, "truncated" if cut else "")

    def _text(self, one: Passage) -> Answer:
        encoding = self._tokenizer(one.text, return_offsets_mapping=True, verbose=False)
        kept = prompt_length(len(encoding["input_ids"]), self.settings.prompt_tokens)
        prompt = one.text[: max((end for _, end in encoding["offset_mapping"][:kept]), default=0)]
        if not prompt:
            return failed("nothing")
        said, tokens, _ = self._choice("/completions", one, {"prompt": prompt}, "text")
        return Answer({"content": f"{prompt}{said or ''}"}, tokens)

    def _choice(self, path: str, one: Asked, asks: dict[str, Any], part: str) -> tuple[Any, int, bool]:
        """What was said, in how many tokens (0: the server does not say), and whether it was cut off."""
        settings = self.settings
        sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "seed": one.seed(self.recipe.seed) % (1 << 31)}
        filters = {"top_k": settings.top_k} if settings.top_k else {}   # not OpenAI's own, so only where it is asked for
        body = self._post(path, {"model": self.model, **asks, "max_tokens": settings.max_new_tokens, **sampling, **filters})
        try:
            choice = body["choices"][0]
            return choice[part], int((body.get("usage") or {}).get("completion_tokens") or 0), choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(f"{self.url}{path} does not answer as OpenAI's protocol has it: {_short(str(body))}") from None

    def _post(self, path: str, asks: dict[str, Any]) -> dict[str, Any]:
        """Raises Refused for what is this prompt's fault, UserError when there is no answer after all retries."""
        problem, after = "", 0.0
        for attempt in range(self.settings.retries + 1):
            if attempt and self.stopped.wait(_pause(attempt, after)):
                break
            try:
                response = self.client.post(f"{self.url}{path}", json=asks)
            except httpx2.TransportError as error:
                problem, after = f"{type(error).__name__}: {_short(str(error))}", 0.0
                continue
            if response.status_code == 200:
                return self._body(response, path)
            problem = f"status {response.status_code}: {_short(response.text) or '(no body)'}"
            if response.status_code in ROWS_FAULT:
                raise Refused(problem)
            if response.status_code < 500 and response.status_code not in PASSING:
                raise UserError(f"{self.url}{path} refuses with {problem}; {self._advice(response.status_code)}")
            after = _seconds(response.headers.get("retry-after"))
        raise UserError(
            f"{self.url}{path} gave no answer in {self.settings.retries + 1} attempts, at last {problem}; "
            "see that it runs, or lower regenerate.concurrency; the same command then goes on from here"
        )

    def _body(self, response: httpx2.Response, path: str) -> dict[str, Any]:
        try:
            body = response.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise UserError(f"{self.url}{path} does not answer as OpenAI's protocol has it: {_short(response.text)}")
        return body

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            return "name the environment variable that holds the key with regenerate.api_key"
        return f"see that regenerate.endpoint is all that stands before /chat/completions (mostly up to /v1) and serves {self.model!r}"


def _pause(attempt: int, after: float) -> float:
    """Seconds before that attempt. Drawn from a range, so that all threads do not come back at once."""
    longest = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1))
    return max(longest * random.uniform(0.5, 1), min(after, LONGEST_WAIT))


def _seconds(header: str | None) -> float:
    """Of a Retry-After; a date is not read."""
    return float(header) if header is not None and header.isdecimal() else 0.0


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else f"{text[:297]}..."
