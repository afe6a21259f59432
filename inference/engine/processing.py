"""Applies logits processors at every node of a tree, each node with the history of its own path.

Processors, from transformers or the user, are functions of (ids so far, scores). The common ones ignore the ids and take all nodes at
once; the others are called once per history length. They get a row's ids without padding, so that a row gets the same scores in a batch
as alone; processors that only count positions get the padding too, because transformers included it when it created them.

Shape suffixes: B batch, N tree nodes, V vocabulary, T positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper
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
"""Processors that ignore the ids; a sequence bias of single tokens ignores them too (`is_blind`)."""

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
"""Processors that refer to prompts or rows by number."""


def is_blind(processor: LogitsProcessor) -> bool:
    """True if the processor's scores do not depend on the ids."""
    if isinstance(processor, known.SequenceBiasLogitsProcessor):
        return all(len(sequence) == 1 for sequence in processor.sequence_bias)
    return type(processor) in BLIND


TOP_K_SIZES = tuple(16**power * 4 for power in range(1, 6))
"""Numbers of largest logits among which a top-k filter of drafts looks for its threshold; few, since each is captured apart."""


@dataclass(frozen=True)
class Filters:
    """transformers' top-k, top-p and min-p filters for draft logits; None: not filtered so.

    The values are tensors ``[1]``, so that a captured function serves all of them.
    """

    top_k_1: Tensor | None
    top_k_size: int
    """How many of the largest logits are looked at: at least top-k."""
    left_out_1: Tensor | None
    """``1 - top_p``."""
    min_p_1: Tensor | None

    @staticmethod
    def of(top_k: int, top_p: float, min_p: float, device: torch.device) -> Filters | None:
        """The filters with these values; None if they filter nothing (top_k 0, top_p 1 and min_p 0)."""
        if not top_k and top_p >= 1 and not min_p:
            return None
        size = next((size for size in TOP_K_SIZES if size >= top_k), TOP_K_SIZES[-1]) if top_k else 0
        return Filters(
            torch.full((1,), min(top_k, size), device=device) if top_k else None,
            size,
            torch.full((1,), 1 - top_p, dtype=torch.float32, device=device) if top_p < 1 else None,
            torch.full((1,), min_p, dtype=torch.float32, device=device) if min_p else None,
        )

    def __call__(self, logits_NV: Tensor) -> Tensor:
        """Set the logits of filtered tokens to -inf."""
        if self.top_k_1 is not None:
            V = logits_NV.shape[-1]
            largest_NK = logits_NV.topk(min(self.top_k_size, V)).values
            index_N1 = (self.top_k_1.clamp(max=V) - 1).expand(len(logits_NV), 1)
            logits_NV = logits_NV.masked_fill(logits_NV < largest_NK.gather(1, index_N1), -math.inf)
        if self.left_out_1 is not None:
            ascending_NV = logits_NV.sort(-1)
            out_NV = ascending_NV.values.softmax(-1).cumsum(-1) <= self.left_out_1
            out_NV[:, -1:] = False
            logits_NV = logits_NV.masked_fill(out_NV.scatter(1, ascending_NV.indices, out_NV), -math.inf)
        if self.min_p_1 is not None:
            probs_NV = logits_NV.softmax(-1)
            logits_NV = logits_NV.masked_fill(probs_NV < self.min_p_1 * probs_NV.amax(-1, keepdim=True), -math.inf)
        return logits_NV


@dataclass(frozen=True)
class History:
    """A row's ids ``[T]``; the first ``pads`` of them are padding."""

    ids_T: Tensor
    pads: int


class Processing:
    """The logits processors of one call, applied to trees."""

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
    def repeatable(self) -> bool:
        """True if nothing but transformers' own processors is applied, none of them by row: they give the same when called again."""
        return not self.one_by_one and all(type(one).__module__.startswith("transformers.") for one in self.processors)

    @property
    def temperature(self) -> float:
        """The temperature; draft logits are divided by it too."""
        return next((float(p.temperature) for p in self.processors if isinstance(p, TemperatureLogitsWarper)), 1.0)

    def filters(self, device: torch.device) -> Filters | None:
        """The filters, for draft logits too; None if there are none."""
        return Filters.of(
            next((p.top_k for p in self.processors if isinstance(p, known.TopKLogitsWarper)), 0),
            next((p.top_p for p in self.processors if isinstance(p, known.TopPLogitsWarper)), 1.0),
            next((p.min_p for p in self.processors if isinstance(p, known.MinPLogitsWarper)), 0.0),
            device,
        )

    def __call__(self, logits_BNV: Tensor, histories: list[History], tree: CandidateTree | None) -> Tensor:
        """Processed scores ``[B, N, V]`` (float32). ``histories``: the ids of each row, root included (without a tree: its prompt)."""
        scores_BNV = logits_BNV.float()
        if not self.processors:
            return scores_BNV
        B, N, V = scores_BNV.shape
        if self.blind:
            return self.processors(histories[0].ids_T[None], scores_BNV.reshape(B * N, V)).reshape(B, N, V)
        alike: dict[tuple[int, ...], list[tuple[int, int, Tensor]]] = {}
        for b, history in enumerate(histories):
            for n, ids_T in enumerate(_node_histories(history.ids_T, tree, b)):
                key = (b, n) if self.one_by_one else (len(ids_T), history.pads)
                alike.setdefault(key, []).append((b, n, ids_T))
        out_BNV = scores_BNV.clone()   # padding nodes keep their raw scores
        for group in alike.values():
            rows, nodes = [b for b, _, _ in group], [n for _, n, _ in group]
            out_BNV[rows, nodes] = self._apply(torch.stack([ids for _, _, ids in group]), histories[rows[0]].pads, scores_BNV[rows, nodes])
        return out_BNV

    def _apply(self, ids_RT: Tensor, pads: int, scores_RV: Tensor) -> Tensor:
        for processor in self.processors:
            scores_RV = processor(ids_RT if isinstance(processor, COUNTING) else ids_RT[:, pads:], scores_RV)
        return scores_RV


def _without_padding(processor: LogitsProcessor, pads: list[int]) -> LogitsProcessor:
    """The repetition penalty without transformers' per-row padding lengths, since histories here have no padding; others as given."""
    ignored = processor.prompt_ignore_length if isinstance(processor, known.RepetitionPenaltyLogitsProcessor) else None
    if not isinstance(ignored, Tensor):
        return processor
    if ignored.tolist() != pads:
        raise UserError("prompt_ignore_length goes by row numbers, which trees don't have; give one int, or decode without it")
    return known.RepetitionPenaltyLogitsProcessor(processor.penalty)


def _node_histories(history_T: Tensor, tree: CandidateTree | None, row: int) -> list[Tensor]:
    """The ids up to each node: the history, then the tokens on the path to the node."""
    if tree is None:
        return [history_T]
    tokens, parents = history_T.new_tensor(tree.tokens[row]), tree.parents[row]
    histories = [history_T]
    for n in range(1, len(parents)):
        histories.append(torch.cat([histories[parents[n]], tokens[n : n + 1]]))
    return histories
