"""Logits processors at every node of a tree, each node with the history of its own path.

Processors are transformers' own or the user's: functions of (ids so far, scores). The common ones do not look at the ids and
take all nodes at once; the others are called once for each length of history. They see a row without its padding, so that a row
in a batch gets what it gets alone; those that only count positions see it padded, as transformers counted when it made them.

Shape suffixes: B batch, N tree nodes, V vocabulary, T positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation import logits_process as known

from headstart.inference.engine.tree import CandidateTree
from headstart.support.errors import UserError

BLIND = (
    known.TemperatureLogitsWarper,
    known.TopKLogitsWarper,
    known.TopPLogitsWarper,
    known.MinPLogitsWarper,
    known.TypicalLogitsWarper,
    known.EpsilonLogitsWarper,
    known.EtaLogitsWarper,
    known.LogitNormalization,
    known.InfNanRemoveLogitsProcessor,
    known.SuppressTokensLogitsProcessor,
)
"""Processors that do not look at the ids; a bias of single tokens is another (`is_blind`)."""

COUNTING = (
    known.MinLengthLogitsProcessor,
    known.MinNewTokensLengthLogitsProcessor,
    known.ForcedBOSTokenLogitsProcessor,
    known.ForcedEOSTokenLogitsProcessor,
    known.ExponentialDecayLengthPenalty,
    known.SuppressTokensAtBeginLogitsProcessor,
)
"""Processors that depend only on the number of ids."""


BY_ROW = (
    known.PrefixConstrainedLogitsProcessor,
    known.EncoderRepetitionPenaltyLogitsProcessor,
    known.EncoderNoRepeatNGramLogitsProcessor,
)
"""Processors that know prompts or rows by number."""


def is_blind(processor: LogitsProcessor) -> bool:
    """True if the processor's scores do not depend on the ids."""
    if isinstance(processor, known.SequenceBiasLogitsProcessor):
        return all(len(sequence) == 1 for sequence in processor.sequence_bias)
    return type(processor) in BLIND


@dataclass(frozen=True)
class Filters:
    """top-k, top-p and min-p; draft logits are filtered as the backbone's are."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __call__(self, logits_NV: Tensor) -> Tensor:
        """-inf where a token is filtered out (0, 1 and 0 filter nothing)."""
        ids: Any = None   # these do not look at the ids
        if self.top_k:
            logits_NV = TopKLogitsWarper(self.top_k)(ids, logits_NV)
        if self.top_p < 1:
            logits_NV = TopPLogitsWarper(self.top_p)(ids, logits_NV)
        if self.min_p:   # transformers' own cannot be captured
            probs_NV = logits_NV.softmax(-1)
            logits_NV = logits_NV.masked_fill(probs_NV < self.min_p * probs_NV.amax(-1, keepdim=True), -math.inf)
        return logits_NV


@dataclass(frozen=True)
class History:
    """A row's ids ``[T]``, of which the first ``pads`` are padding."""

    ids_T: Tensor
    pads: int


class Processing:
    """The processors of one call to generate, applied to trees."""

    def __init__(self, processors: LogitsProcessorList, pads: list[int]) -> None:
        rows = len(pads)
        for processor in processors:
            if isinstance(processor, known.UnbatchedClassifierFreeGuidanceLogitsProcessor):
                raise UserError("guidance_scale runs the model a second time at every step, which trees can't follow; leave it out")
            if isinstance(processor, known.SynthIDTextWatermarkLogitsProcessor):
                raise UserError("SynthID watermarks keep a state from step to step, which trees don't have; leave watermarking_config out")
            if isinstance(processor, BY_ROW) and rows > 1:
                raise UserError(f"{type(processor).__name__} goes by row numbers; got {rows} rows: decode one row at a time")
        self.processors = LogitsProcessorList(_without_padding(processor, pads) for processor in processors)
        self.blind = all(is_blind(processor) for processor in processors)
        self.one_by_one = any(isinstance(processor, BY_ROW) for processor in processors)

    @property
    def temperature(self) -> float:
        """Draft logits are divided by it too."""
        return next((float(p.temperature) for p in self.processors if isinstance(p, TemperatureLogitsWarper)), 1.0)

    @property
    def filters(self) -> Filters | None:
        """Draft logits are filtered by them too; None: not filtered."""
        filters = Filters(
            next((p.top_k for p in self.processors if isinstance(p, known.TopKLogitsWarper)), 0),
            next((p.top_p for p in self.processors if isinstance(p, known.TopPLogitsWarper)), 1.0),
            next((p.min_p for p in self.processors if isinstance(p, known.MinPLogitsWarper)), 0.0),
        )
        return None if filters == Filters() else filters

    def __call__(self, logits_BNV: Tensor, histories: list[History], tree: CandidateTree | None) -> Tensor:
        """Scores ``[B, N, V]`` (float32). ``histories``: each row's up to and with the root (or the prompt, without a tree)."""
        scores_BNV = logits_BNV.float()
        if not self.processors:
            return scores_BNV
        B, N, V = scores_BNV.shape
        if self.blind:
            return self.processors(histories[0].ids_T[None], scores_BNV.reshape(B * N, V)).view(B, N, V)
        alike: dict[tuple[int, ...], list[tuple[int, int, Tensor]]] = {}
        for b, history in enumerate(histories):
            for n, ids_T in enumerate(_node_histories(history.ids_T, tree, b)):
                key = (b, n) if self.one_by_one else (len(ids_T), history.pads)
                alike.setdefault(key, []).append((b, n, ids_T))
        out_BNV = scores_BNV.clone()   # rows with fewer nodes keep raw scores at their ends
        for group in alike.values():
            rows, nodes = [b for b, _, _ in group], [n for _, n, _ in group]
            out_BNV[rows, nodes] = self._apply(torch.stack([ids for _, _, ids in group]), histories[rows[0]].pads, scores_BNV[rows, nodes])
        return out_BNV

    def _apply(self, ids_RT: Tensor, pads: int, scores_RV: Tensor) -> Tensor:
        for processor in self.processors:
            scores_RV = processor(ids_RT if isinstance(processor, COUNTING) else ids_RT[:, pads:], scores_RV)
        return scores_RV


def _without_padding(processor: LogitsProcessor, pads: list[int]) -> LogitsProcessor:
    """transformers passes each row's padding to the repetition penalty; histories here have none."""
    ignored = processor.prompt_ignore_length if isinstance(processor, known.RepetitionPenaltyLogitsProcessor) else None
    if not isinstance(ignored, Tensor):
        return processor
    if ignored.tolist() != pads:
        raise UserError("prompt_ignore_length goes by row numbers, which trees don't have; give one int, or decode without it")
    return known.RepetitionPenaltyLogitsProcessor(processor.penalty)


def _node_histories(history_T: Tensor, tree: CandidateTree | None, row: int) -> list[Tensor]:
    """The ids up to each node: the history, then the tokens on the path down to it."""
    if tree is None:
        return [history_T]
    tokens, parents = history_T.new_tensor(tree.tokens[row]), tree.parents[row]
    histories = [history_T]
    for n in range(1, len(parents)):
        histories.append(torch.cat([histories[parents[n]], tokens[n : n + 1]]))
    return histories
