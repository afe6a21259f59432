"""Applies logits processors at every node of a tree, each node with the history of its own path.

Processors are functions of (ids so far, scores). The common ones ignore the ids and take all nodes at once; the others are called once
per history length. Ids are those that transformers gives, padding included. A processor that may keep a state cannot be asked about nodes
that are rejected later: with one of these, all are called as transformers calls them, and nothing is drafted.

Where its state can be undone, as that of matchers of grammars, it forks along the tree (`Forked`). Contract: a processor with a method
``rollback(n)``, which undoes its last n calls. Each call has one token more than the one before, and the state follows from the ids
alone. For batches it also has ``of_row(row)``, which returns the processor of one row, with a state of its own. With ``forced(ids)``, it
names the tokens that must follow these ids ``[1, T]``, which are drafted; its state is then as before.

Shape suffixes: B batch, N tree nodes, R histories, V vocabulary, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation import logits_process as known

from headstart.heads.own_readout import largest
from headstart.inference.engine.known_processors import STATELESS, is_blind, is_stateless, name_of, of_row
from headstart.inference.engine.tree import CandidateTree
from headstart.support.errors import UserError

MOST_LEFT = 64
"""The largest draft logits, which filters look at: what they leave beyond these is seldom drafted."""


@dataclass(frozen=True)
class Filters:
    """transformers' top-k, top-p and min-p filters for draft logits, which leave the `MOST_LEFT` largest at most.

    The values are tensors ``[1]``, and one that filters nothing stands for no filter, so that a captured function serves all.
    """

    top_k_1: Tensor
    top_p_1: Tensor
    min_p_1: Tensor

    @staticmethod
    def of(top_k: int, top_p: float, min_p: float, device: torch.device) -> Filters | None:
        """The filters with these values; None if they filter nothing (top_k 0, top_p 1 and min_p 0)."""
        if not top_k and top_p >= 1 and not min_p:
            return None
        place = partial(torch.full, (1,), device=device)
        return Filters(place(top_k or 1 << 40), place(top_p if top_p < 1 else 2.0), place(min_p, dtype=torch.float32))

    def __call__(self, logits_NV: Tensor) -> Tensor:
        """Set the logits of filtered tokens to -inf."""
        best_NK, index_NK = largest(logits_NV, min(MOST_LEFT, int(logits_NV.shape[-1])))
        place_K = torch.arange(best_NK.shape[-1], device=best_NK.device)
        best_NK = best_NK.masked_fill(place_K >= self.top_k_1, -math.inf)
        some, all_ = best_NK.logsumexp(-1, keepdim=True), logits_NV.logsumexp(-1, keepdim=True)
        probs_NK = (best_NK - torch.where(self.top_k_1 > MOST_LEFT, all_, some)).exp()
        out_NK = (probs_NK.cumsum(-1) - probs_NK >= self.top_p_1) | (probs_NK < self.min_p_1 * probs_NK[:, :1])
        best_NK = best_NK.masked_fill(out_NK & (place_K > 0), -math.inf)
        return torch.full_like(logits_NV, -math.inf).scatter(-1, index_NK, best_NK)


def is_forkable(processor: Any, rows: int) -> bool:
    """True if the processor's state can be undone, in each of so many rows."""
    return callable(getattr(processor, "rollback", None)) and (rows == 1 or callable(getattr(processor, "of_row", None)))


class Forked:
    """The processor of one row, called for any text that begins with the prompt."""

    def __init__(self, processor: Any, row: int, rows: int) -> None:
        self.processor: Any = processor if rows == 1 else processor.of_row(row)
        self.forced: Callable[[Tensor], list[int]] | None = getattr(self.processor, "forced", None)
        self._called: list[int] | None = None
        """The tokens after the prompt of the last call; None before the first."""
        self._scores_V: Tensor | None = None
        """Some scores, for calls that are made for the state alone."""

    def __call__(self, prompt_T: Tensor, written: list[int], scores_V: Tensor) -> Tensor:
        """Processed scores ``[V]`` after the prompt and these tokens."""
        self._scores_V = scores_V
        self._go_before(prompt_T, written, scores_V)
        return self._call(prompt_T, written, scores_V)

    def settle(self, prompt_T: Tensor, written: list[int]) -> None:
        """Leave the state as calls for this text, and none beyond it, leave it."""
        if self._called != written and self._scores_V is not None:
            self(prompt_T, written, self._scores_V)

    def _go_before(self, prompt_T: Tensor, written: list[int], scores_V: Tensor) -> None:
        """Undo calls for other texts, and call again for what was undone of this one, so that the next call is the one for this text."""
        if self._called is None:
            first = 0
        else:
            common = common_prefix(self._called, written)
            first = min(common + 1, len(written)) if written else 0
            undone = len(self._called) - (first - 1)
            if undone:
                self.processor.rollback(undone)
        for count in range(first, len(written)):
            self._call(prompt_T, written[:count], scores_V)

    def _call(self, prompt_T: Tensor, written: list[int], scores_V: Tensor) -> Tensor:
        self._called = written
        ids_1T = prompt_T[None] if not written else _joined(prompt_T, written)
        return applied(self.processor, ids_1T, scores_V[None].clone())[0]


def applied(processor: Any, ids_RT: Tensor, scores_RV: Tensor) -> Tensor:
    """What a processor makes of scores. Raises UserError unless it gives as many."""
    found, shape = processor(ids_RT, scores_RV), list(scores_RV.shape)
    if not isinstance(found, Tensor) or [*found.shape] != shape:
        gave = f"scores of shape {[*found.shape]}" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"{name_of(processor)} returned {gave} for scores of shape {shape}; return as many, -inf for what it rules out")
    return found


def allowed(scores_V: Tensor, token: int) -> bool:
    """True if a pick may be this token: it is not ruled out, or all are and it is the first of them."""
    return scores_V[token].item() > -math.inf or int(scores_V.argmax()) == token


def _joined(prompt_T: Tensor, written: list[int]) -> Tensor:
    return torch.cat([prompt_T, prompt_T.new_tensor(written)])[None]


def common_prefix(tokens: list[int], other: list[int]) -> int:
    """The number of tokens with which both begin."""
    count = min(len(tokens), len(other))
    return count if tokens[:count] == other[:count] else next(i for i in range(count) if tokens[i] != other[i])


@dataclass(frozen=True)
class History:
    """The text up to a root, padding included, and the number of its row in the call."""

    prompt_T: Tensor
    written: list[int]
    row: int
    ends: Callable[[list[int]], bool] = lambda written: False
    """Whether a text ends with these tokens, so that nothing is asked about what follows."""

    @property
    def ids_T(self) -> Tensor:
        """All ids."""
        return self.after(self.written)

    def after(self, written: list[int]) -> Tensor:
        """The ids of the prompt followed by these tokens."""
        return torch.cat([self.prompt_T, self.prompt_T.new_tensor(written)])


class Processing:
    """The logits processors of one call of ``rows`` rows, each of ``beams`` beams."""

    def __init__(self, processors: LogitsProcessorList, rows: int, beams: int = 1) -> None:
        self.processors = processors
        stateful = [processor for processor in processors if not is_stateless(processor)]
        self.unknown = [processor for processor in stateful if beams > 1 or not is_forkable(processor, rows)]
        """Those that may keep a state which cannot be undone."""
        self.forked: list[dict[int, Forked]] = []
        """For each row, those whose state forks along trees, by their place among the processors."""
        if stateful and not self.unknown:
            places = [place for place, processor in enumerate(processors) if not is_stateless(processor)]
            self.forked = [{place: Forked(processors[place], row, rows) for place in places} for row in range(rows)]
        self._by_row = [[of_row(processor, row, beams) for processor in processors] for row in range(rows)]
        self._alike = all(processor is other for of in self._by_row for processor, other in zip(of, processors, strict=True))
        """True if no processor goes by row numbers."""
        self.blind = not stateful and all(is_blind(processor) for processor in processors)
        self.choosy = any(type(processor) not in STATELESS for processor in processors)
        """True if one is the user's own, and may refuse a text that its earlier answers rule out."""

    @property
    def repeatable(self) -> bool:
        """True if nothing but transformers' own processors is applied, and these give the same when called again."""
        own = all(type(processor).__module__.startswith("transformers.") for processor in self.processors)
        return own and not self.unknown

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
        scores_BV = logits_BV.to(torch.float32, copy=True)  # which processors may change in place
        for processor in self.processors:
            scores_BV = applied(processor, ids_BT, scores_BV)
        return scores_BV

    def __call__(self, logits_BNV: Tensor, histories: list[History], tree: CandidateTree | None) -> Tensor:
        """Processed scores ``[B, N, V]`` (float32). ``histories``: the ids of each row, root included (without a tree: its prompt)."""
        scores_BNV = logits_BNV.float()
        if not self.processors:
            return scores_BNV
        if self.forked:
            return torch.stack([self._fork(*row, tree, b) for b, row in enumerate(zip(scores_BNV, histories, strict=True))])
        B, N, V = scores_BNV.shape
        if self.blind:
            return self.processors(histories[0].ids_T[None], scores_BNV.reshape(B * N, V)).reshape(B, N, V)
        alike: dict[tuple[int, int], list[tuple[int, int, Tensor]]] = {}
        for b, history in enumerate(histories):
            for n, ids_T in enumerate(_node_histories(history.ids_T, tree, b)):
                alike.setdefault((len(ids_T), 0 if self._alike else history.row), []).append((b, n, ids_T))
        out_BNV = scores_BNV.clone()  # padding, and nodes that no pick can reach, keep raw scores
        left_out = set[tuple[int, int]]()

        def is_reached(b: int, n: int, ids_T: Tensor) -> bool:
            if not n or tree is None or not self.choosy:
                return True
            parent, written = tree.parents[b][n], ids_T[len(histories[b].prompt_T) :].tolist()
            reached = (b, parent) not in left_out and allowed(out_BNV[b, parent], written[-1]) and not histories[b].ends(written)
            left_out.update(() if reached else {(b, n)})
            return reached

        for (_, row), nodes_there in sorted(alike.items(), key=lambda item: item[0]):  # shorter texts first
            if not (group := [one for one in nodes_there if is_reached(*one)]):
                continue
            rows, nodes = [b for b, _, _ in group], [n for _, n, _ in group]
            ids_RT, scores_RV = torch.stack([ids_T for _, _, ids_T in group]), scores_BNV[rows, nodes]
            for processor in self.processors if self._alike else self._by_row[row]:
                scores_RV = applied(processor, ids_RT, scores_RV)
            out_BNV[rows, nodes] = scores_RV.float()
        return out_BNV

    def _fork(self, scores_NV: Tensor, history: History, tree: CandidateTree | None, b: int) -> Tensor:
        """Processed scores of one row's nodes, from one node to the next along the tree; those that no pick can reach are left out."""
        processors, forked, out_NV = self._by_row[history.row], self.forked[history.row], scores_NV.clone()
        tokens, parents = ([0], [0]) if tree is None else (tree.tokens[b], tree.parents[b])
        below: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            below[parents[node]].append(node)
        waiting = [(0, history.written)]
        while waiting:
            node, written = waiting.pop()
            if node and history.ends(written):
                continue
            for place, processor in enumerate(processors):
                if place in forked:
                    out_NV[node] = forked[place](history.prompt_T, written, out_NV[node])
                else:
                    out_NV[node] = applied(processor, history.after(written)[None], out_NV[node][None])[0]
            # The first child, which is mostly the likeliest, comes last: its calls then need not be made again.
            waiting += [(child, [*written, tokens[child]]) for child in below[node] if allowed(out_NV[node], tokens[child])]
        return out_NV

    @property
    def forces(self) -> bool:
        """True if a processor names tokens that must follow."""
        return any(state.forced is not None for forked in self.forked for state in forked.values())

    def settle(self, histories: list[History]) -> None:
        """Leave states as calls for these texts, each without its last token, leave them, as after transformers' loop."""
        for history, forked in zip(histories, self.forked, strict=True):
            for state in forked.values():
                state.settle(history.prompt_T, history.written[:-1])


def _node_histories(history_T: Tensor, tree: CandidateTree | None, row: int) -> list[Tensor]:
    """The ids up to each node: the history, then the tokens on the path to the node."""
    if tree is None:
        return [history_T]
    tokens, parents = history_T.new_tensor(tree.tokens[row]), tree.parents[row]
    histories = [history_T]
    for n in range(1, len(parents)):
        histories.append(torch.cat([histories[parents[n]], tokens[n : n + 1]]))
    return histories
