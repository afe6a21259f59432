"""Continues prompts, in one batch or from a queue, and measures the mean acceptance length (tau), the metric of training, by it.

Only the given settings are used: sampling defaults in a model's generation_config.json are ignored, so that measurements at the same
temperature sample the same distribution. Shape suffixes: B batch, T positions.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headstart.heads.backbone.features import Images
from headstart.inference.decode import Decoder
from headstart.inference.engine.request import Request, require_memory, require_side
from headstart.inference.engine.tree import TreeShape, TreeSize
from headstart.inference.generate import GenerateOutput, SpeculativeModel
from headstart.inference.runtime import turn
from headstart.inference.steps import Step, Tally
from headstart.support.errors import UserError

MOSTLY = 0.5
"""The share of passes above which it is said that drafts rested."""


@dataclass(frozen=True)
class Settings:
    """Decoding settings. Temperature 0 is greedy; ``top_k`` 0 and ``top_p`` 1 filter nothing."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    tree: TreeSize = "auto"
    """Fixed or adaptive tree size."""

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``model.generate``, with or without heads."""
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return {
            "max_new_tokens": self.max_new_tokens,
            "stop_strings": list(self.stop) or None,
            "return_dict_in_generate": True,
            **(sampling if self.temperature > 0 else {"do_sample": False}),
        }


def said(tau: float, rested: float) -> str:
    """tau in words, and why it is near 1 if drafts rested in most passes. ``rested``: in which share."""
    mostly = f" (drafts rested in {rested:.0%} of the passes: they cost more than they save here)"
    return f"{tau:.2f}{mostly if rested > MOSTLY else ''}"


@contextmanager
def only_given_settings(model: PreTrainedModel) -> Iterator[None]:
    """Inside this context, ``model.generate`` takes only the special tokens from the model's generation config."""
    config = model.generation_config
    eos = config.eos_token_id
    pad = config.pad_token_id
    if pad is None:  # a single sequence needs no padding, but transformers warns about a missing token
        pad = 0 if eos is None else eos if isinstance(eos, int) else eos[0]
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=eos, pad_token_id=pad)
    try:
        yield
    finally:
        model.generation_config = config


def continue_texts(
    heads: SpeculativeModel, prompts: Sequence[Tensor], settings: Settings, seeds: Sequence[int], **own: Any
) -> GenerateOutput:
    """Continue prompts with the heads in one batch, padded on the left, each with its seed.

    ``own``: other arguments of `SpeculativeModel.generate` (speculate, timed, streamer, tokenizer).
    """
    model = heads.backbone.model
    with only_given_settings(model):
        return model.generate(
            **padded(prompts, model),
            custom_generate=heads.generate,
            seed=list(seeds),
            tree=settings.tree,
            **settings.arguments(),
            **own,
        )


def continue_text(heads: SpeculativeModel, prompt_T: Tensor, settings: Settings, seed: int, **own: Any) -> GenerateOutput:
    """Continue one prompt with the heads; ``own`` as for `continue_texts`."""
    return continue_texts(heads, [prompt_T], settings, [seed], **own)


def continue_by_transformers(model: PreTrainedModel, prompts: Sequence[Tensor], settings: Settings, seed: int, **theirs: Any) -> Any:
    """Continue prompts in one batch with transformers' own ``generate``; ``theirs``: its other arguments."""
    torch.manual_seed(seed)
    with only_given_settings(model):
        return model.generate(**padded(prompts, model), **settings.arguments(), **theirs)


def padded(prompts: Sequence[Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` ``[B, T]`` of prompts padded on the left with token 0, which is masked."""
    ids_BT = pad_sequence(list(prompts), batch_first=True, padding_side="left")
    lengths_B = torch.tensor([len(prompt_T) for prompt_T in prompts])
    mask_BT = torch.arange(ids_BT.shape[1]) >= ids_BT.shape[1] - lengths_B[:, None]
    return {"input_ids": ids_BT.to(model.device), "attention_mask": mask_BT.long().to(model.device)}


def measure_tau(
    heads: SpeculativeModel,
    prompts: Iterable[Tensor],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    tree: TreeSize = "auto",
) -> dict[str, Any]:
    """Measure ``tau`` (tokens per backbone pass, its own token included), ``acceptance_per_depth``, ``tokens`` and ``passes``.

    ``prompts``: int64 [T] each; prompt i is decoded with ``seed + i``. ``tokens`` includes the first token of each sequence, which the
    prefill writes, so ``tau`` is slightly below ``tokens / passes``. Raises UserError without prompts.
    """
    settings = Settings(max_new_tokens, temperature, tree=tree)
    tally = Tally()
    for i, prompt_T in enumerate(prompts):
        tally.join(continue_text(heads, prompt_T, settings, seed + i).tally)
    if not tally.tokens:
        raise UserError("no prompts to measure on; give at least one")
    return {"tau": tally.tau, "acceptance_per_depth": tally.acceptance_per_depth, "tokens": tally.tokens, "passes": tally.passes}


# A queue of prompts, decoded in one batch that is always full:
#
#     prompts = iter([Prompt(ids_T, seed=0, key="first"), ...])
#     for step in stream(heads, lambda: next(prompts, None), Queue(settings, batch_size=8)):
#         for ended in step.ended:
#             print(ended.prompt.key, ended.tokens)
#
# Tokens are those of `SpeculativeModel.generate` with the same settings and seeds.


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
