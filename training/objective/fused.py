"""Readout and divergence in one, chunk by chunk: a loss that brings its gradient along, and no ``[T, V]`` anywhere.

A chunk's logits live while its loss and their gradient are computed; the gradient goes back through the drafter's readout at
once and is added up for the hidden states and for the readout's own weights (whatever autograd finds behind the logits). What
is left when all chunks are done is a number and gradients of the size of its inputs; `Ledger.attach` makes them a node of the
graph. Nothing is computed twice, as it would be under checkpointing.

Shape suffixes: M teacher positions, C teacher positions of a chunk, D width, V vocabulary, K depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.base import Drafter
from headstart.training.objective.terms import FEATURES, Teacher, compare, gradient, mix, regression, teach
from headstart.training.recipe.recipe import Objective

CACHED, LEAST_ROWS = 2**19, 128
"""On a CPU: logits that stay in its caches (2 MB in fp32), and rows that keep its matrix products efficient."""


class LossRows(NamedTuple):
    """Teacher positions of a batch: the backbone there, the text around it, and what each depth's draft of it weighs."""

    hidden_MD: Tensor
    given_M: Tensor
    """``x_j``, the last token the distribution at j is conditioned on: the parent of the token drafted."""
    text_M: Tensor
    """``x_{j+1}``."""
    counts_MK: Tensor
    """Whether depth k drafts this token: False near the start of a document, where ``j-1-k`` lies before it."""
    weights_MK: Tensor
    """Of the terms; 0 where it does not count."""

    def part(self, rows: slice) -> LossRows:
        return LossRows(*(tensor[rows] for tensor in self))


@dataclass(frozen=True)
class Fused:
    """One objective's loss of one drafter, as a function of its hidden states."""

    wanted: Objective
    backbone: Backbone
    drafter: Drafter

    @property
    def vocabulary(self) -> Tensor | None:
        found = self.drafter.vocabulary
        return found if found is None else found.to(self.backbone.device)

    def sum(self, places: LossRows, drafts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted loss, with gradients; correct first choices of each depth; overlap of each depth. Sums over all places."""
        ledger = Ledger(drafts)
        parts = [self._chunk(places.part(rows), rows, ledger) for rows in self.chunks(len(places.text_M))]
        loss, correct_K, overlap_K = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
        return ledger.attach(loss), correct_K, overlap_K

    def _chunk(self, places: LossRows, rows: slice, ledger: Ledger) -> tuple[Tensor, Tensor, Tensor]:
        """One teacher for all depths."""
        with torch.no_grad(), torch.autocast(places.text_M.device.type, enabled=False):   # in its own dtype, as when decoding
            teacher = teach(self.backbone.readout(places.hidden_MD), self.vocabulary)
        sums = [self._depth(k, teacher, places, rows, ledger) for k in range(len(ledger.drafts))]
        losses_K, correct_K, overlap_K = (torch.stack(part) for part in zip(*sums, strict=True))
        return losses_K.sum(), correct_K, overlap_K

    def _depth(self, k: int, teacher: Teacher, places: LossRows, rows: slice, ledger: Ledger) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, correct first choices and overlap of one depth; its logits are gone when it returns."""
        leaf_CD, logits_CV = self.read(ledger.drafts[k], k, rows, places.given_M)
        counts_C, weight_C = places.counts_MK[:, k], places.weights_MK[:, k]
        with torch.no_grad():
            draft = compare(teacher, logits_CV.detach())
            loss = mix(teacher, draft, weight_C, self.wanted)
            if logits_CV.requires_grad:
                ledger.back(k, rows, leaf_CD, logits_CV, gradient(draft))
            if share := self.wanted.terms.get(FEATURES):
                value, gradient_CD = regression(leaf_CD.detach(), places.hidden_MD, share * weight_C)
                loss = loss + value
                ledger.add(k, rows, gradient_CD)
            choice_C = draft.choice_C if self.vocabulary is None else self.vocabulary[draft.choice_C]
            return loss, ((choice_C == teacher.choice_C) & counts_C).sum(), (draft.overlap_C * counts_C).sum()

    def read(self, draft_MD: Tensor, k: int, rows: slice, given_C: Tensor) -> tuple[Tensor, Tensor]:
        """A chunk's hidden states, cut off from what made them, and their logits."""
        leaf_CD = draft_MD[rows].detach().requires_grad_(draft_MD.requires_grad and torch.is_grad_enabled())
        return leaf_CD, self.drafter.readout(leaf_CD, k, given_C)

    def chunks(self, count: int) -> Iterator[slice]:
        """``count`` positions in runs of at most ``objective.chunk``, one at least. A CPU is given what stays in its caches."""
        size = self.wanted.chunk
        if self.backbone.device.type == "cpu":
            drafted = self.backbone.vocab if self.drafter.vocabulary is None else len(self.drafter.vocabulary)
            size = min(size, max(LEAST_ROWS, CACHED // drafted))
        yield from (slice(start, min(start + size, count)) for start in range(0, max(count, 1), size))


class Ledger:
    """Gradients as they come in: of the M hidden states of each depth, and of every weight behind the logits."""

    def __init__(self, drafts: list[Tensor]) -> None:
        self.drafts = drafts
        self.of_drafts = [torch.zeros_like(draft_MD) for draft_MD in drafts] if torch.is_grad_enabled() else []
        self.of_weights: dict[Tensor, Tensor] = {}

    def add(self, k: int, rows: slice, gradient_CD: Tensor) -> None:
        if self.of_drafts:
            self.of_drafts[k][rows] += gradient_CD

    def back(self, k: int, rows: slice, leaf_CD: Tensor, logits_CV: Tensor, gradient_CV: Tensor) -> None:
        """Send the gradient of a chunk's logits through the readout that made them of ``leaf_CD``."""
        inputs = [weight for weight in leaves(logits_CV) if weight is not leaf_CD] + [leaf_CD] * leaf_CD.requires_grad
        with torch.autocast(logits_CV.device.type, enabled=False):   # as any backward: in the dtypes of the forward
            found = torch.autograd.grad(logits_CV, inputs, gradient_CV.to(logits_CV.dtype), allow_unused=True)
        for tensor, part in zip(inputs, found, strict=True):
            if tensor is leaf_CD and part is not None:
                self.add(k, rows, part)
            elif tensor in self.of_weights and part is not None:
                self.of_weights[tensor].add_(part)
            elif part is not None:
                self.of_weights[tensor] = part

    def attach(self, loss: Tensor) -> Tensor:
        """The loss as a function of the hidden states and the weights, differentiable once."""
        if not torch.is_grad_enabled():
            return loss
        pairs = [*zip(self.drafts, self.of_drafts, strict=True), *self.of_weights.items()]
        known = [(tensor, part) for tensor, part in pairs if tensor.requires_grad]
        return _Attached.apply(loss, len(known), *(part for _, part in known), *(tensor for tensor, _ in known))


class _Attached(torch.autograd.Function):
    """A number with gradients that are known: ``(loss, n, n gradients, n inputs)``."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[:count])
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        known = ctx.saved_tensors
        return None, None, *(None for _ in known), *(part * scale for part in known)


def leaves(output: Tensor) -> list[Tensor]:
    """The tensors behind it whose gradient a backward would fill in."""
    found: list[Tensor] = []
    nodes: list[Any] = [output.grad_fn] if output.grad_fn is not None else []
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        following = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(following)
        nodes += following
        found += [one.variable for one in following if one.name().endswith("AccumulateGrad")]
    return found
