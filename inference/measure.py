"""Measures the mean acceptance length (tau), the metric of training, by decoding prompts.

Only the given settings are used: sampling defaults in a model's generation_config.json are ignored, so that measurements at the same
temperature sample the same distribution. Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from headstart.inference.engine.tree import TreeSize
from headstart.inference.generate import GenerateOutput, SpeculativeModel
from headstart.inference.steps import Tally
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
