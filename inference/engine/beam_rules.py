"""The beam search settings of one call, and its logits processors adapted to one beam at a time.

Shape suffixes: R histories, T positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as known

from headstart.support.errors import UserError


@dataclass(frozen=True)
class BeamRules:
    """The beam search settings of one call. Lengths include left padding, as in transformers."""

    beams: int
    returned: int
    """The number of best sequences returned per row."""
    length_penalty: float
    early_stopping: bool | str
    longest: int
    """The maximum length, which ``early_stopping="never"`` assumes for the length penalty."""
    candidates: int
    """The number of continuations that a step considers over all beams: enough that at least ``beams`` of them do not end."""
    fill: int
    """The padding token after the end of a sequence."""


def read_beam_rules(config: GenerationConfig) -> BeamRules | None:
    """Read the beam search settings of a call; None if it is not a beam search."""
    if not config.num_beams or config.num_beams == 1:
        return None
    eos = [] if config._eos_token_tensor is None else config._eos_token_tensor.flatten().tolist()
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    return BeamRules(
        beams=config.num_beams,
        returned=config.num_return_sequences,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        longest=config.max_length,
        candidates=max(2, 1 + len(eos)) * config.num_beams,
        fill=(pad or eos[0]) if eos else -1,   # as in transformers, a padding token of 0 counts as none
    )


def beam_processors(processors: LogitsProcessorList, beams: int) -> LogitsProcessorList:
    """Adapt the processors to one beam at a time. Raises UserError for a processor that does not allow it."""
    return LogitsProcessorList(_for_one_beam(processor, beams) for processor in processors)


def _for_one_beam(processor: LogitsProcessor, beams: int) -> LogitsProcessor:
    if isinstance(processor, known.EncoderRepetitionPenaltyLogitsProcessor):
        raise UserError("encoder_repetition_penalty changes the first beam alone in transformers; leave it out, or set num_beams=1")
    if isinstance(processor, known.PrefixConstrainedLogitsProcessor):
        return Allowed(processor._prefix_allowed_tokens_fn, 1)
    ignored = processor.prompt_ignore_length if isinstance(processor, known.RepetitionPenaltyLogitsProcessor) else None
    if isinstance(ignored, Tensor):   # one value per beam
        return known.RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=ignored[::beams])
    return processor


class Allowed(known.PrefixConstrainedLogitsProcessor):
    """transformers' processor, without its error if all tokens allowed for a row's beams are excluded by other processors."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        mask_RV = torch.full_like(scores, -torch.inf)
        for row, ids_T in enumerate(input_ids):
            tokens = self._prefix_allowed_tokens_fn(0, ids_T)
            if not len(tokens):
                raise UserError("prefix_allowed_tokens_fn returned an empty list; let it allow some token, such as the one that ends it")
            mask_RV[row, tokens] = 0
        return scores + mask_RV
