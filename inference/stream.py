"""Decode a queue of prompts in one batch that is always full, and hand out each continuation when it ends.

    prompts = iter([Prompt(ids_T, seed=0, key="first"), ...])
    for step in stream(heads, lambda: next(prompts, None), Queue(settings, batch_size=8)):
        for ended in step.ended:
            print(ended.prompt.key, ended.tokens)

Tokens are those of `SpeculativeModel.generate` with the same settings and seeds. Shape suffix: T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headstart.heads.backbone.images import Images
from headstart.inference.decode import Decoder
from headstart.inference.engine.request import Request, require_memory, require_side
from headstart.inference.engine.tree import TreeShape
from headstart.inference.generate import SpeculativeModel
from headstart.inference.handover import turn
from headstart.inference.measure import Settings
from headstart.inference.steps import Step


@dataclass(frozen=True)
class Prompt:
    ids_T: Tensor
    """int64 [T]."""
    seed: int
    key: Any
    """Whatever the caller knows it by."""
    images: Images | None = None


@dataclass(frozen=True)
class Ended:
    """A prompt with its whole continuation."""

    prompt: Prompt
    tokens: list[int]


@dataclass(frozen=True)
class Progress:
    """A decoding step: the number of tokens written after each prompt being continued (those of the prefill apart), and what has ended."""

    written: list[tuple[Prompt, int]]
    ended: list[Ended]
    forward: Step | None
    """The forward pass; None if all prompts that were taken ended with their first token."""


@dataclass(frozen=True)
class Queue:
    """How the prompts of a queue are continued. ``settings``: no stop strings."""

    settings: Settings
    batch_size: int
    """Rows decoded at once."""
    end_tokens: Collection[int] = ()
    """Tokens that end a continuation."""
    speculate: bool = True
    """False: autoregressive decoding."""


@torch.no_grad()
def stream(heads: SpeculativeModel, take: Callable[[], Prompt | None], queue: Queue) -> Generator[Progress]:
    """Continue prompts until there are no more, ``batch_size`` at a time.

    ``take`` returns the next prompt, or None if there is none for the time being: it is called again after each step, so a prompt may
    follow from what has ended. Raises UserError as generate does for a prompt that cannot be continued.
    """
    assert not queue.settings.stop
    with turn(heads.backbone.model), heads.running():
        together = heads.backbone.dependence is None
        engine = heads.engine(queue.speculate and together and bool(heads.drafters or heads.proposers))
        request, shape = _request(heads.backbone.device, queue), queue.settings.tree
        seeds_B = torch.zeros(queue.batch_size, dtype=torch.int64, device=heads.backbone.device) if request.sample else None
        fixed = shape if isinstance(shape, TreeShape) else None
        decoder = Decoder(engine.reader, engine.policy, request, fixed, seeds_B, queue.batch_size if together else 1)
        rows = _Rows(decoder, take, queue)
        while live := rows.fill():
            forward = decoder.step() if decoder.admit() else None
            written = [] if forward is None else [(live[number], tokens) for number, tokens in forward.written.items()]
            over = [number for number in live if decoder.texts.of[number].ended]
            yield Progress(written, [Ended(live.pop(number), decoder.texts.of[number].written) for number in over], forward)


class _Rows:
    """The prompts being continued, by the numbers of their sequences."""

    def __init__(self, decoder: Decoder, take: Callable[[], Prompt | None], queue: Queue) -> None:
        self.decoder, self.take, self.queue = decoder, take, queue
        self.live: dict[int, Prompt] = {}

    def fill(self) -> dict[int, Prompt]:
        """Take prompts for the free rows; returns what is being continued."""
        backbone, device = self.decoder.reader.backbone, self.decoder.device
        while len(self.live) < self.queue.batch_size and (prompt := self.take()) is not None:
            length = len(prompt.ids_T)
            limit = length + self.queue.settings.max_new_tokens
            require_side(backbone, length)
            require_memory(backbone, len(self.live) + 1, length, 1)
            number = next(number for number in count() if number not in self.live)
            self.live[number] = prompt
            self.decoder.put(number, prompt.ids_T.to(device), limit, prompt.seed, prompt.images)
        return self.live


def _request(device: torch.device, queue: Queue) -> Request:
    """The request of a call without prompts; the logits processors are those that transformers makes of the settings, in its order."""
    settings, processors = queue.settings, LogitsProcessorList()
    sample = settings.temperature > 0
    if sample and settings.temperature != 1:
        processors.append(TemperatureLogitsWarper(settings.temperature))
    if sample and settings.top_k:
        processors.append(TopKLogitsWarper(settings.top_k))
    if sample and settings.top_p < 1:
        processors.append(TopPLogitsWarper(settings.top_p))
    return Request.plain(torch.zeros(0, 0, dtype=torch.int64, device=device), 0, queue.end_tokens, processors, sample)
