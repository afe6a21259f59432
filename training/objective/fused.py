"""Fused readout and loss over chunks: the gradient is computed with the loss, without ``[T, V]`` logits.

A chunk's logits exist only while its loss and their gradient are computed. The gradient is propagated through the drafter's readout
immediately and accumulated for the hidden states and the readout's weights (the leaves of the logits' autograd graph). The result
is the loss and gradients of the size of its inputs, which `GradientAccumulator.attach` makes one node of the graph. Unlike with
checkpointing, nothing is computed twice.

On stored features, where the backbone is not here to decode, acceptance is measured too: teacher-forced, by depth, as a chain. A depth of
a draft counts as accepted where all depths before it do and it agrees with the backbone: by the most likely token (greedy), or by the
expected acceptance rate ``sum_v min(p_v, q_v)``. The drafts continue the text, not the backbone's own choices, so on text that the
backbone did not write the figures differ from those of decoding.

Shape suffixes: M rows of the loss, C rows of a chunk, D width, V vocabulary, K depth, N drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import Features
from headstart.heads.base import Drafter
from headstart.heads.layers.causal_attention import chunk_policy
from headstart.training.objective import terms
from headstart.training.objective.loss_rows import LossRows, StepKey, dense_rows, sample_anchors, text_rows
from headstart.training.objective.terms import SoftTarget
from headstart.training.recipe.training import Objective

CPU_ROWS, CPU_LOGITS = 512, 2**25
"""Size of chunks on a CPU: rows enough for efficient matrix products, and few sums of the weights' gradients; at most so many logits."""


@dataclass(frozen=True)
class FusedLoss:
    """Loss of one drafter as a function of its hidden states."""

    settings: Objective
    drafter: Drafter
    compiled: bool = False
    """Whether what is done with logits is compiled (`terms.compiled`)."""

    @property
    def vocabulary(self) -> Tensor | None:
        vocabulary = self.drafter.vocabulary
        return vocabulary if vocabulary is None else vocabulary.to(self.drafter.backbone.device)

    def sum(self, rows: LossRows, drafts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted loss, with gradients, and per depth the number of top-1 agreements and the summed acceptance rate."""
        gradients, targets = GradientAccumulator(drafts), self._targets(rows)
        parts = [self._chunk(rows, chunk, targets, gradients) for chunk in self.chunks(len(rows))]
        loss, correct_K, alpha_K = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
        return gradients.attach(loss), correct_K, alpha_K

    def _targets(self, rows: LossRows) -> Callable[[slice, int], SoftTarget]:
        """Return the function from a chunk and a column to its target; where normalisers are known, of the draft vocabulary's logits."""
        hidden_MJD, norm_MJ, choice_MJ = rows.hidden_MJD, rows.norm_MJ, rows.choice_MJ
        backbone, vocabulary = self.drafter.backbone, self.vocabulary
        if norm_MJ is None or choice_MJ is None or vocabulary is None:
            return lambda chunk, i: terms.soft_target(backbone.readout(hidden_MJD[chunk, i]), vocabulary)
        readout = _partial_readout(backbone, vocabulary)
        return lambda chunk, i: terms.known_target(readout(hidden_MJD[chunk, i]), norm_MJ[chunk, i], choice_MJ[chunk, i], vocabulary)

    def _chunk(
        self, rows: LossRows, chunk: slice, targets: Callable[[slice, int], SoftTarget], gradients: GradientAccumulator
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = []
        for i in range(len(gradients.drafts)):
            if i < rows.hidden_MJD.shape[1]:  # one target for all depths, or one per depth
                with torch.no_grad(), torch.autocast(rows.hidden_MJD.device.type, enabled=False):  # in its own dtype, as in decoding
                    target = targets(chunk, i)
            at = rows.drafted(chunk, i)
            chosen = target if isinstance(at, slice) else SoftTarget(*(part[at - chunk.start] for part in target))
            sums.append(self._depth(i, chosen, rows.part(at), at, gradients))
        losses_K, correct_K, alpha_K = (torch.stack(part) for part in zip(*sums, strict=True))
        return losses_K.sum(), correct_K, alpha_K

    def _depth(
        self, i: int, target: SoftTarget, rows: LossRows, at: slice | Tensor, gradients: GradientAccumulator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, top-1 agreements and summed acceptance rate of column i in the rows ``at``; its logits are freed on return."""
        leaf_CD, logits_CV = self.chunk_logits(gradients.drafts[i], i, at, rows)
        counts_C, weight_C = rows.counts_MK[:, i], rows.weights_MK[:, i]
        odds_C = self.drafter.confidence(leaf_CD, _column(rows.parents_MJ, i))
        with torch.no_grad():
            compute = terms.compiled() if self.compiled else terms.compare_and_mix
            found = compute(target, logits_CV.detach(), weight_C, self.settings)
            loss = found.loss
            if logits_CV.requires_grad:
                gradients.backward(i, at, leaf_CD, logits_CV, found.gradient_CV)
            if share := self.settings.terms.get(terms.FEATURES):
                value, gradient_CD = terms.regression(leaf_CD.detach(), _column(rows.hidden_MJD, i), share * weight_C)
                loss = loss + value
                gradients.add(i, at, gradient_CD)
            if odds_C is not None:
                value, gradient_C = terms.likelihood(odds_C, found.alpha_C, weight_C)
                loss = loss + value
                if odds_C.requires_grad:
                    gradients.backward(i, at, leaf_CD, odds_C, gradient_C)
            choice_C = found.choice_C if self.vocabulary is None else self.vocabulary[found.choice_C]
            return loss, ((choice_C == target.choice_C) & counts_C).sum(), (found.alpha_C * counts_C).sum()

    def chunk_logits(self, draft_MD: Tensor, i: int, at: slice | Tensor, rows: LossRows) -> tuple[Tensor, Tensor]:
        """Return the detached hidden states of column i in the rows ``at``, and their logits; ``rows`` are those rows."""
        leaf_CD = draft_MD[at].detach().requires_grad_(draft_MD.requires_grad and torch.is_grad_enabled())
        return leaf_CD, self.drafter.readout(leaf_CD, rows.first_depth + i, _column(rows.parents_MJ, i))

    def chunks(self, count: int) -> Iterator[slice]:
        """Divide ``count`` rows into chunks of at most ``objective.chunk_size``, smaller on a CPU to fit its caches; at least one chunk."""
        size, policy = self.settings.chunk_size, chunk_policy()
        if (policy.device_type or self.drafter.backbone.device.type) == "cpu":
            vocab = self.drafter.backbone.vocab if self.drafter.vocabulary is None else len(self.drafter.vocabulary)
            size = min(size, CPU_ROWS, max(CPU_LOGITS // vocab, 1))
        yield from policy.select([slice(start, min(start + size, count)) for start in range(0, max(count, 1), size)])


def _partial_readout(backbone: Backbone, tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the backbone's readout of these tokens alone, whose rows of the output layer are copied."""
    layer = backbone.unembed
    if type(layer) is not nn.Linear or not layer.weight.is_floating_point():
        return lambda hidden: backbone.readout(hidden).index_select(-1, tokens)
    weight, bias = layer.weight[tokens], None if layer.bias is None else layer.bias[tokens]
    return lambda hidden: backbone.postprocess(nn.functional.linear(hidden, weight, bias))


def _column(values: Tensor, i: int) -> Tensor:
    """Select column i, or the only one if all depths share it: ``[M, J, ...]`` -> ``[M, ...]``."""
    return values[:, min(i, values.shape[1] - 1)]


class GradientAccumulator:
    """Gradients of each depth's hidden states and of the readout's weights, summed over chunks."""

    def __init__(self, drafts: list[Tensor]) -> None:
        self.drafts = drafts
        self.of_drafts = [torch.zeros_like(draft_MD) for draft_MD in drafts] if torch.is_grad_enabled() else []
        self.of_weights: dict[Tensor, Tensor] = {}

    def add(self, i: int, at: slice | Tensor, gradient_CD: Tensor) -> None:
        if self.of_drafts:
            self.of_drafts[i][at] += gradient_CD

    def backward(self, i: int, at: slice | Tensor, leaf_CD: Tensor, logits_CV: Tensor, gradient_CV: Tensor) -> None:
        """Propagate the gradient of a chunk's logits through the readout to ``leaf_CD`` and the weights."""
        inputs = [weight for weight in leaves(logits_CV) if weight is not leaf_CD] + [leaf_CD] * leaf_CD.requires_grad
        with torch.autocast(logits_CV.device.type, enabled=False):  # a backward uses the dtypes of its forward
            gradients = torch.autograd.grad(logits_CV, inputs, gradient_CV.to(logits_CV.dtype), allow_unused=True)
        for tensor, part in zip(inputs, gradients, strict=True):
            if tensor is leaf_CD and part is not None:
                self.add(i, at, part)
            elif tensor in self.of_weights and part is not None:
                self.of_weights[tensor].add_(part)
            elif part is not None:
                self.of_weights[tensor] = part

    def attach(self, loss: Tensor) -> Tensor:
        """Return the loss with its gradients attached, as a once-differentiable function of hidden states and weights."""
        if not torch.is_grad_enabled():
            return loss
        pairs = [*zip(self.drafts, self.of_drafts, strict=True), *self.of_weights.items()]
        known = [(tensor, part) for tensor, part in pairs if tensor.requires_grad]
        return _Attached.apply(loss, len(known), *(part for _, part in known), *(tensor for tensor, _ in known))


class _Attached(torch.autograd.Function):
    """A scalar with precomputed gradients: ``(loss, n, n gradients, n inputs)``."""

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
    """Return the leaf tensors in the graph of ``output`` that a backward would give gradients."""
    found: list[Tensor] = []
    nodes: list[Any] = [output.grad_fn] if output.grad_fn is not None else []
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        following = [function for function, _ in node.next_functions if function is not None and function not in seen]
        seen.update(following)
        nodes += following
        found += [function.variable for function in following if function.name().endswith("AccumulateGrad")]
    return found


@torch.no_grad()
def acceptance(loss: FusedLoss, rows: Iterable[Features], sampled: bool, seed: int) -> dict[str, Any] | None:
    """Return ``teacher_forced_tau`` (the backbone's own token included) and ``teacher_forced_acceptance_per_depth`` over these features:
    the share of drafts whose token of a depth is accepted. None without drafts of label tokens.

    ``sampled``: by acceptance rates at temperature 1, else greedily.
    """
    depths = loss.drafter.trained_depth
    accepted_K, counted_K = torch.zeros(depths, dtype=torch.float64), torch.zeros(depths, dtype=torch.float64)
    for features in rows:
        for reached_NK, counts_NK in _chains(loss, features, sampled, seed):
            accepted_K += reached_NK.sum(0).double().cpu()
            counted_K += counts_NK.sum(0).double().cpu()
    if not counted_K[0]:
        return None
    shares = (accepted_K / counted_K.clamp(min=1)).tolist()
    return {"teacher_forced_tau": 1 + sum(shares), "teacher_forced_acceptance_per_depth": shares, "sampled": sampled}


def _chains(loss: FusedLoss, features: Features, sampled: bool, seed: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield by draft and depth how far the chain is accepted, and where it counts: ``[N, K]``."""
    drafter = loss.drafter
    if drafter.anchor_share < 1:
        anchors = sample_anchors(features, drafter.trained_depth, drafter.anchor_share, StepKey(seed, 0))
        if not len(anchors):
            return
        rows, drafts = text_rows(features, anchors), drafter(features, anchors.at)
        yield _agreement(loss, rows, drafts, sampled).cumprod(1) * rows.counts_MK, rows.counts_MK
        return
    rows, drafts, draft_MK = dense_rows(features, drafter(features, None))
    if not len(rows):
        return
    agree_MK, K, count = _agreement(loss, rows, drafts, sampled), len(drafts), features.tokens_BT.numel()
    index_MK = torch.where(rows.counts_MK, draft_MK, count) * K + torch.arange(K, device=draft_MK.device)
    agree_NK, counts_NK = agree_MK.new_zeros(2, (count + 1) * K).unbind()
    agree_NK.scatter_(0, index_MK.flatten(), (agree_MK * rows.counts_MK).flatten())
    counts_NK.scatter_(0, index_MK.flatten(), rows.counts_MK.to(agree_MK.dtype).flatten())
    counts_NK = counts_NK.view(-1, K).cumprod(1)  # a chain whose start is no label has none
    yield agree_NK.view(-1, K).cumprod(1) * counts_NK, counts_NK


def _agreement(loss: FusedLoss, rows: LossRows, drafts: list[Tensor], sampled: bool) -> Tensor:
    """Return by row and depth whether draft and backbone agree, or the acceptance rate: ``[M, K]``."""
    found_MK = torch.zeros(len(rows), len(drafts), device=rows.counts_MK.device)
    for chunk in loss.chunks(len(rows)):
        part = rows.part(chunk)
        for i, draft_MD in enumerate(drafts):
            if i < part.hidden_MJD.shape[1]:
                target = terms.soft_target(loss.drafter.backbone.readout(part.hidden_MJD[:, i]), loss.vocabulary)
            draft = terms.compare(target, loss.chunk_logits(draft_MD, i, chunk, part)[1])
            choice_C = draft.choice_C if loss.vocabulary is None else loss.vocabulary[draft.choice_C]
            found_MK[chunk, i] = draft.alpha_C.float() if sampled else (choice_C == target.choice_C).float()
    return found_MK
