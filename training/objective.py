"""What a drafter is trained for: to say what the backbone would say, at every depth, without ever holding ``[T, V]`` logits.

The backbone's distribution at position j is that of ``x_{j+1}``. Depth k drafts ``x_{t+2+k}`` at position t, so the one
distribution at j teaches every depth k, at ``t = j-1-k``. The loop therefore runs over chunks of teacher positions j, reads
the backbone's logits of a chunk once, and then every depth's. Where there are several chunks each is checkpointed: its logits
live while it is computed and, once more, while its gradient is, and no other chunk's do.

The loss is a sum over depths and learned tokens; whoever calls it divides by the number of learned tokens of the whole
optimiser step (`count_learned`), over every process and accumulated micro-batch. That number is what makes the reduction
independent of padding, accumulation and the number of processes.

With a draft vocabulary the backbone's p is restricted to it and *not* renormalised, so the gradient of the KL term is that
of cross-entropy with the soft targets p_v (the rest of p's mass teaches nothing), and the overlap is the true one. Tokens
outside the draft vocabulary cannot be drafted: they add nothing to the ce term, and count as wrong in the accuracy.

Shape suffixes: B batch, T positions, D width, V vocabulary, K depth, M teacher positions, C teacher positions of a chunk.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headstart.heads.backbone import Backbone
from headstart.heads.base import Drafter, Features

if TYPE_CHECKING:
    from headstart.training.recipe import Objective  # that reads TERMS

TERMS = ("kl", "ce")
"""What a recipe may mix: forward KL from the backbone's distribution, and cross-entropy on the text itself."""


class Sums(NamedTuple):
    """Sums over the learned tokens of a batch; per depth where the name ends in K. Sums of batches add up."""

    loss: Tensor
    count_K: Tensor
    """Positions at which a depth drafts a learned token."""
    correct_K: Tensor
    """Of them, where the draft's first choice is the backbone's: the chance of acceptance, given the tokens before."""
    overlap_K: Tensor
    """Sum of ``sum_v min(p_v, q_v)``, p and q at temperature 1."""


class Places(NamedTuple):
    """Teacher positions of a batch (M) or of a chunk (C): the backbone there, and the text around it."""

    hidden_CD: Tensor
    given_C: Tensor
    """``x_j``, the last token the distribution at j is conditioned on: the parent of the token drafted."""
    text_C: Tensor
    """``x_{j+1}``."""
    counts_CK: Tensor
    """Whether depth k drafts this token: False near the start of a document, where ``j-1-k`` lies before it."""

    def split(self, size: int) -> list[Places]:
        return [Places(*parts) for parts in zip(*(tensor.split(size) for tensor in self), strict=True)]


class Teacher(NamedTuple):
    """What the backbone says at the positions of a chunk, over the draft vocabulary."""

    p_CV: Tensor
    negentropy_C: Tensor
    """``sum_v p_v log p_v``: what makes cross-entropy with soft targets a divergence."""
    choice_C: Tensor
    """Its first choice, over the whole vocabulary."""
    target_C: Tensor
    """Place of the text's own token in the draft vocabulary; of some other token where it has none."""
    has_target_C: Tensor


def objective(wanted: Objective, backbone: Backbone, drafter: Drafter, features: Features, hidden: list[Tensor]) -> Sums:
    """Sums over a batch, given what ``drafter(features)`` returned; only ``loss`` carries gradients."""
    places, drafts = _places(features, hidden)
    chunks = places.split(wanted.chunk)
    split_drafts = zip(*(draft_MD.split(wanted.chunk) for draft_MD in drafts), strict=True)
    run = partial(checkpoint, _chunk, use_reentrant=False) if len(chunks) > 1 else _chunk   # one alone may keep its logits
    parts = [run(wanted, backbone, drafter, chunk, drafts_CD) for chunk, drafts_CD in zip(chunks, split_drafts, strict=True)]
    loss, correct_K, overlap_K = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
    return Sums(loss, places.counts_CK.sum(0), correct_K, overlap_K)


def _chunk(wanted: Objective, backbone: Backbone, drafter: Drafter, places: Places, drafts_CD: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Loss, correct and overlap of one chunk, summed: one teacher for all depths."""
    vocabulary = None if drafter.vocabulary is None else drafter.vocabulary.to(places.text_C.device)
    teacher = _teach(backbone, vocabulary, places)
    losses, correct, overlap = [], [], []
    for k, draft_CD in enumerate(drafts_CD):
        log_q_CV = _wide(drafter.readout(draft_CD, k, places.given_C)).log_softmax(-1)
        counts_C = places.counts_CK[:, k]
        losses.append(wanted.depth_decay**k * (_divergence(wanted.terms, teacher, log_q_CV) * counts_C).sum())
        with torch.no_grad():
            choice_C = log_q_CV.argmax(-1)
            choice_C = choice_C if vocabulary is None else vocabulary[choice_C]
            correct.append(((choice_C == teacher.choice_C) & counts_C).sum())
            overlap.append((torch.minimum(teacher.p_CV, log_q_CV.exp()).sum(-1) * counts_C).sum())
    return torch.stack(losses).sum(), torch.stack(correct), torch.stack(overlap)


def _divergence(terms: dict[str, float], teacher: Teacher, log_q_CV: Tensor) -> Tensor:
    """The mixed terms at each position of a chunk."""
    mixed_C = torch.zeros_like(log_q_CV[:, 0])
    if terms.get("kl"):
        mixed_C = mixed_C + terms["kl"] * (teacher.negentropy_C - (teacher.p_CV * log_q_CV).sum(-1))
    if terms.get("ce"):
        surprise_C = -log_q_CV.gather(-1, teacher.target_C[:, None]).squeeze(-1)
        mixed_C = mixed_C + terms["ce"] * surprise_C * teacher.has_target_C
    return mixed_C


def counted(learn_BT: Tensor, document_BT: Tensor, depth: int) -> Tensor:
    """bool ``[B, T-1]``: whether that depth drafts the token after teacher position j, so at position ``j-1-depth``.

    It must be one to learn, and the drafting position must lie in the same document.
    """
    back = depth + 2
    inside_BT = F.pad(document_BT[:, back:] == document_BT[:, :-back], (min(back, document_BT.shape[1]), 0))
    return (learn_BT & inside_BT & (document_BT >= 0))[:, 1:]


def count_learned(learn_BT: Tensor, document_BT: Tensor) -> Tensor:
    """Number of learned tokens: those that some depth drafts, and whatever depth k drafts depth 0 drafts too."""
    return counted(learn_BT, document_BT, 0).sum()


def _places(features: Features, hidden: list[Tensor]) -> tuple[Places, list[Tensor]]:
    """The M teacher positions that any depth learns from, and each depth's hidden states that face them.

    Where a depth does not count it gets some other position's state: a fixed shape is worth more than the few rows saved,
    and a depth that drafts nothing in a batch still takes part in the graph, which data parallelism needs.
    """
    assert features.learn_BT is not None and features.document_BT is not None
    counts_KBT = torch.stack([counted(features.learn_BT, features.document_BT, k) for k in range(len(hidden))])
    row_M, j_M = counts_KBT[0].nonzero(as_tuple=True)
    tokens_BT = features.tokens_BT
    places = Places(features.hidden_BTD[row_M, j_M], tokens_BT[row_M, j_M], tokens_BT[row_M, j_M + 1], counts_KBT[:, row_M, j_M].T)
    drafts = []
    for k, draft_BTD in enumerate(hidden):
        draft_BTD = draft_BTD if draft_BTD.shape[1] else F.pad(draft_BTD, (0, 0, 0, 1))
        drafts.append(draft_BTD[row_M, (j_M - 1 - k).clamp(min=0)])
    return places, drafts


@torch.no_grad()
def _teach(backbone: Backbone, vocabulary: Tensor | None, places: Places) -> Teacher:
    with torch.autocast(places.hidden_CD.device.type, enabled=False):   # the backbone speaks in its own dtype, as when decoding
        logits_CV = _wide(backbone.readout(places.hidden_CD))
    p_CV, choice_C = logits_CV.softmax(-1), logits_CV.argmax(-1)
    target_C, has_target_C = places.text_C, torch.ones_like(places.text_C, dtype=torch.bool)
    if vocabulary is not None:
        p_CV = p_CV[:, vocabulary]
        target_C = torch.searchsorted(vocabulary, places.text_C).clamp(max=len(vocabulary) - 1)
        has_target_C = vocabulary[target_C] == places.text_C
    return Teacher(p_CV, -torch.special.entr(p_CV).sum(-1), choice_C, target_C, has_target_C)


def _wide(logits: Tensor) -> Tensor:
    """At least fp32: the softmax of bf16 logits is too coarse to learn from."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
