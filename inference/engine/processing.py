"""Applies logits processors at every node of a tree, each node with the history of its own path.

Processors are functions of (ids so far, scores). The common ones ignore the ids and take all nodes at once; the others are called once per
history length. Ids are those that transformers gives, padding included. A processor that may keep a state cannot be asked about nodes
that are rejected later: with one of these, all are called as transformers calls them, and nothing is drafted.

Shape suffixes: B batch, N tree nodes, R histories, V vocabulary, T positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation import logits_process as known

from headstart.inference.engine.filters import Filters
from headstart.inference.engine.known_processors import is_blind, is_stateless, of_row
from headstart.inference.engine.tree import CandidateTree


@dataclass(frozen=True)
class History:
    """The ids ``[T]`` up to a root, padding included, and the number of its row in the call."""

    ids_T: Tensor
    row: int


class Processing:
    """The logits processors of one call of ``rows`` rows, each of ``beams`` beams."""

    def __init__(self, processors: LogitsProcessorList, rows: int, beams: int = 1) -> None:
        self.processors = processors
        self.unknown = [processor for processor in processors if not is_stateless(processor)]
        """Those that may keep a state."""
        self._by_row = [[of_row(processor, row, beams) for processor in processors] for row in range(rows)]
        self._alike = all(one is other for of in self._by_row for one, other in zip(of, processors, strict=True))
        """True if no processor goes by row numbers."""
        self.blind = all(is_blind(processor) for processor in processors)

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

    def in_order(self, ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
        """Processed scores ``[B, V]`` (float32) of all rows of the call, by calls as transformers makes them."""
        scores_BV: Tensor = self.processors(ids_BT, logits_BV.to(torch.float32, copy=True))   # which processors may change in place
        return scores_BV

    def __call__(self, logits_BNV: Tensor, histories: list[History], tree: CandidateTree | None) -> Tensor:
        """Processed scores ``[B, N, V]`` (float32). ``histories``: the ids of each row, root included (without a tree: its prompt)."""
        scores_BNV = logits_BNV.float()
        if not self.processors:
            return scores_BNV
        B, N, V = scores_BNV.shape
        if self.blind:
            return self.processors(histories[0].ids_T[None], scores_BNV.reshape(B * N, V)).view(B, N, V)
        alike: dict[tuple[int, int], list[tuple[int, int, Tensor]]] = {}
        for b, history in enumerate(histories):
            for n, ids_T in enumerate(_node_histories(history.ids_T, tree, b)):
                alike.setdefault((len(ids_T), 0 if self._alike else history.row), []).append((b, n, ids_T))
        out_BNV = scores_BNV.clone()   # padding nodes keep their raw scores
        for (_, row), group in alike.items():
            rows, nodes = [b for b, _, _ in group], [n for _, n, _ in group]
            out_BNV[rows, nodes] = _applied(self._by_row[row], torch.stack([ids_T for _, _, ids_T in group]), scores_BNV[rows, nodes])
        return out_BNV


def _applied(processors: list[LogitsProcessor], ids_RT: Tensor, scores_RV: Tensor) -> Tensor:
    for processor in processors:
        scores_RV = processor(ids_RT, scores_RV)
    return scores_RV


def _node_histories(history_T: Tensor, tree: CandidateTree | None, row: int) -> list[Tensor]:
    """The ids up to each node: the history, then the tokens on the path to the node."""
    if tree is None:
        return [history_T]
    tokens, parents = history_T.new_tensor(tree.tokens[row]), tree.parents[row]
    histories = [history_T]
    for n in range(1, len(parents)):
        histories.append(torch.cat([histories[parents[n]], tokens[n : n + 1]]))
    return histories
