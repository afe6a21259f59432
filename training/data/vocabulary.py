"""Draft vocabularies: the most frequent label tokens, and how much of the data a draft vocabulary covers.

Shape suffixes: V backbone vocabulary, DV draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.support.errors import UserError
from headstart.training.data.kept import Splits
from headstart.training.data.sample import Sample


class LabelCounts(NamedTuple):
    """How often each token is a label token (int64 ``[V]``)."""

    training_V: Tensor
    held_out_V: Tensor | None
    """None if nothing is held out."""


def count_labels(samples: Sequence[Sample], vocab: int) -> Tensor:
    """Count each token among the label tokens (int64 ``[V]``). Raises UserError for a token outside the vocabulary."""
    counts_V = torch.bincount(torch.cat([sample.tokens[sample.loss_mask] for sample in samples]), minlength=vocab)
    if len(counts_V) > vocab:
        raise UserError(f"the tokenizer gives token {len(counts_V) - 1}, but the backbone's vocabulary has {vocab}; use the backbone's own")
    return counts_V


def label_counts(splits: Splits, vocab: int) -> LabelCounts:
    """Count the label tokens of the training and the held-out data. Raises UserError as `count_labels` does."""
    return LabelCounts(count_labels(splits.train, vocab), count_labels(splits.eval, vocab) if splits.eval else None)


def most_frequent(counts_V: Tensor, size: int) -> Tensor:
    """Return the ``size`` most frequent tokens, ascending; ties go to the lower id. Raises UserError if there are not as many."""
    if not 1 <= size <= len(counts_V):
        raise UserError(f"a draft vocabulary has between 1 and {len(counts_V)} tokens, as many as the backbone's; got {size}")
    return counts_V.sort(descending=True, stable=True).indices[:size].sort().values


def coverage_report(counts: LabelCounts, tokens_DV: Tensor) -> dict[str, Any]:
    """Return the sizes and the share of label tokens covered, in training and held-out data (None if nothing is held out)."""
    held_out = None if counts.held_out_V is None else _coverage(counts.held_out_V, tokens_DV)
    training = _coverage(counts.training_V, tokens_DV)
    return {"size": len(tokens_DV), "vocab_size": len(counts.training_V), "training": training, "held_out": held_out}


def _coverage(counts_V: Tensor, tokens_DV: Tensor) -> float:
    return int(counts_V[tokens_DV.cpu()].sum()) / max(int(counts_V.sum()), 1)


def describe_coverage(report: dict[str, Any]) -> str:
    """Describe a `coverage_report`: ``2,048 of 4,096 tokens, 96.1 % of the label tokens (held out 95.8 %)``."""
    held_out = "" if report["held_out"] is None else f" (held out {report['held_out']:.1%})"
    return f"{report['size']:,} of {report['vocab_size']:,} tokens, {report['training']:.1%} of the label tokens{held_out}"
