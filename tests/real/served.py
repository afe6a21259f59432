"""The released model behind OpenAI's protocol, in batches of transformers' own ``generate``; token ids as vLLM returns them."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, Queue
from typing import Any

import torch
from server import answering

MOST = 32
"""Rows of a batch."""
GATHERS = 0.2
"""Seconds that a batch waits for another request."""


class Served:
    """Answers requests, and keeps what it wrote: text of the question -> the tokens of prompt and answer."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.wrote: dict[str, tuple[list[int], list[int]]] = {}
        self.waiting: Queue[tuple[dict[str, Any], Future[dict[str, Any]]] | None] = Queue()
        self.ends = model.generation_config.eos_token_id
        self.ends = {self.ends} if isinstance(self.ends, int) else set(self.ends)

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        future: Future[dict[str, Any]] = Future()
        self.waiting.put((body, future))
        return future.result()

    def work(self) -> None:
        """Answer what waits, in batches of one temperature, until None comes."""
        while (first := self.waiting.get()) is not None:
            batch = [first]
            while len(batch) < MOST:
                try:
                    more = self.waiting.get(timeout=GATHERS)
                except Empty:
                    break
                if more is None:
                    return
                batch.append(more)
            for temperature in {body["temperature"] for body, _ in batch}:
                rows = [one for one in batch if one[0]["temperature"] == temperature]
                try:
                    self.answer(rows, temperature)
                except Exception as error:  # else whoever asked would wait for ever
                    for _, future in rows:
                        future.set_exception(error)

    @torch.no_grad()
    def answer(self, batch: list[tuple[dict[str, Any], Future[dict[str, Any]]]], temperature: float) -> None:
        prompts = [self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False) for body, _ in batch]
        longest = max(map(len, prompts))
        rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=self.model.device)
        how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        most = batch[0][0]["max_tokens"]
        written = self.model.generate(rows, attention_mask=mask, max_new_tokens=most, pad_token_id=0, **how)[:, longest:].tolist()
        for (body, future), prompt, tokens in zip(batch, prompts, written, strict=True):
            end = next((i + 1 for i, token in enumerate(tokens) if token in self.ends), None)
            ids = tokens[:end]
            self.wrote[body["messages"][-1]["content"]] = (prompt, ids)
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop" if end else "length"}
            asked = {"token_ids": ids, "prompt_token_ids": prompt} if body.get("return_token_ids") else {}
            future.set_result({"choices": [choice | asked], "usage": {"completion_tokens": len(ids)}})


@contextmanager
def serving(model: Any, tokenizer: Any) -> Iterator[tuple[Served, str]]:
    served = Served(model, tokenizer)
    worker = threading.Thread(target=served.work)
    worker.start()
    try:
        with answering(lambda path, body, headers: (200, served.ask(body))) as url:
            yield served, f"{url}/v1"
    finally:
        served.waiting.put(None)
        worker.join()
