"""What is known of logits processors and stopping criteria: which keep no state, go by row numbers, or ignore the ids.

Those of transformers are listed by class. One of the user's own is unknown, unless it says what it keeps: `stateless`, or a method
``rollback`` (see `is_forkable`).
"""

import copy
import functools
import logging
from typing import Any, TypeVar

from torch import Tensor
from transformers import EosTokenCriteria, LogitsProcessor, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria, StopStringCriteria
from transformers.generation import logits_process as known

Declared = TypeVar("Declared")
logger = logging.getLogger(__name__)

BLIND: tuple[type, ...] = (
    known.TemperatureLogitsWarper,
    known.TopKLogitsWarper,
    known.TopPLogitsWarper,
    known.TopHLogitsWarper,
    known.MinPLogitsWarper,
    known.TypicalLogitsWarper,
    known.EpsilonLogitsWarper,
    known.EtaLogitsWarper,
    known.LogitNormalization,
    known.InfNanRemoveLogitsProcessor,
    known.SuppressTokensLogitsProcessor,
)
"""Processors that ignore the ids; a sequence bias of single tokens ignores them too (`is_blind`)."""

STATELESS: tuple[type, ...] = (
    *BLIND,
    known.MinLengthLogitsProcessor,
    known.MinNewTokensLengthLogitsProcessor,
    known.ForcedBOSTokenLogitsProcessor,
    known.ForcedEOSTokenLogitsProcessor,
    known.ExponentialDecayLengthPenalty,
    known.SuppressTokensAtBeginLogitsProcessor,
    known.RepetitionPenaltyLogitsProcessor,
    known.NoRepeatNGramLogitsProcessor,
    known.SequenceBiasLogitsProcessor,
    known.NoBadWordsLogitsProcessor,
    known.EncoderRepetitionPenaltyLogitsProcessor,
    known.EncoderNoRepeatNGramLogitsProcessor,
    known.WatermarkLogitsProcessor,  # its generator is seeded by the ids at every call
)
"""Processors whose scores are a function of the ids and the scores they are given."""

BY_ROW_CRITERIA: tuple[type, ...] = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, MaxTimeCriteria)
"""Criteria that judge each row by itself."""


def stateless(declared: Declared) -> Declared:
    """Declare that a logits processor, or a ``prefix_allowed_tokens_fn``, keeps no state: what it returns for a row depends on that row's
    ids and scores alone, in whatever order it is asked. It is then asked about every node of a tree.

    Takes a class, an instance or a function and returns it, as a decorator does. The attribute ``stateless = True`` says the same.
    """
    declared.stateless = True  # type: ignore[attr-defined]
    return declared


def is_stateless(processor: LogitsProcessor) -> bool:
    """True if the processor is known or declared to keep no state."""
    if type(processor) is known.PrefixConstrainedLogitsProcessor:
        return _declared(processor._prefix_allowed_tokens_fn)
    return type(processor) in STATELESS or _declared(processor)


def name_of(processor: Any) -> str:
    """What a user calls the processor or criterion."""
    if type(processor) is known.PrefixConstrainedLogitsProcessor:
        return "prefix_allowed_tokens_fn"
    if type(processor) is known.UnbatchedClassifierFreeGuidanceLogitsProcessor:
        return "guidance_scale"
    return str(getattr(processor, "__name__", type(processor).__name__))


@functools.cache
def say_undeclared(name: str) -> None:
    """Log, once for each name, why nothing is drafted beside that processor."""
    logger.warning(
        f"{name} is not known to keep no state: it is called once for each token, as transformers calls it, and nothing is drafted; if it "
        "keeps none, say so with headstart.stateless (or stateless = True); if it can be undone, give it rollback(n)"
    )


def is_blind(processor: LogitsProcessor) -> bool:
    """True if the processor's scores do not depend on the ids."""
    if type(processor) is known.SequenceBiasLogitsProcessor:
        return all(len(sequence) == 1 for sequence in processor.sequence_bias)
    return type(processor) in BLIND


def is_by_row(criterion: StoppingCriteria) -> bool:
    """True if the criterion is known to judge each row by itself."""
    return type(criterion) in BY_ROW_CRITERIA


def of_row(processor: LogitsProcessor, row: int, beams: int) -> LogitsProcessor:
    """The processor for histories of one row alone, where it refers to prompts or rows by number; else the processor itself.

    ``beams``: the number of beams of a row, each of which it may count as a row.
    """
    if type(processor) is known.EncoderRepetitionPenaltyLogitsProcessor:
        alone = copy.copy(processor)
        alone.encoder_input_ids = processor.encoder_input_ids[row : row + 1]
        return alone
    if type(processor) is known.EncoderNoRepeatNGramLogitsProcessor:
        alone = copy.copy(processor)
        alone.generated_ngrams, alone.batch_size = [processor.generated_ngrams[row]], 1
        return alone
    if type(processor) is known.RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
        return known.RepetitionPenaltyLogitsProcessor(processor.penalty, int(processor.prompt_ignore_length[row * beams]))
    if type(processor) is known.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return known.PrefixConstrainedLogitsProcessor(lambda _, ids_T: allowed(row, ids_T), 1)
    return processor


def _declared(processor: Any) -> bool:
    return getattr(processor, "stateless", False) is True
