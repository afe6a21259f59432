"""The beam search settings of one call."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import GenerationConfig

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
    if config.low_memory:
        raise UserError("low_memory=True is not supported, by transformers' beam search neither; leave it out")
    eos = [] if config._eos_token_tensor is None else config._eos_token_tensor.flatten().tolist()
    pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    return BeamRules(
        beams=config.num_beams,
        returned=config.num_return_sequences,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        longest=config.max_length,
        candidates=max(2, 1 + len(eos)) * config.num_beams,
        fill=(pad or eos[0]) if eos else -1,  # as in transformers, a padding token of 0 counts as none
    )
