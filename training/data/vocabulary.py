"""Draft vocabularies: the most frequent label tokens, and how much of the data a draft vocabulary covers.

Shape suffixes: V backbone vocabulary, DV draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.support.errors import UserError
from headstart.training.data.data import Sample, Splits


def count_labels(samples: Sequence[Sample], vocab: int) -> Tensor:
    """Count each token among the label tokens (int64 ``[V]``). Raises UserError for a token outside the vocabulary."""
    counts_V = torch.bincount(torch.cat([sample.tokens[sample.loss_mask] for sample in samples]), minlength=vocab)
    if len(counts_V) > vocab:
        raise UserError(f"the tokenizer gives token {len(counts_V) - 1}, but the backbone's vocabulary has {vocab}; use the backbone's own")
    return counts_V


def vocabulary_by_frequency(samples: Sequence[Sample], size: int, vocab: int) -> Tensor:
    """Return the ``size`` most frequent label tokens, ascending; ties go to the lower id."""
    if not 1 <= size <= vocab:
        raise UserError(f"a draft vocabulary has between 1 and {vocab} tokens, as many as the backbone's; got {size}")
    return count_labels(samples, vocab).sort(descending=True, stable=True).indices[:size].sort().values


def coverage(counts_V: Tensor, tokens_DV: Tensor) -> float:
    """Return the share of the counted tokens that are in the draft vocabulary."""
    return float(counts_V[tokens_DV.cpu()].sum() / counts_V.sum())


def coverage_report(splits: Splits, tokens_DV: Tensor, vocab: int) -> dict[str, Any]:
    """Return the sizes and the share of label tokens covered, in training and held-out data (None if nothing is held out)."""
    held_out = coverage(count_labels(splits.eval, vocab), tokens_DV) if splits.eval else None
    training = coverage(count_labels(splits.train, vocab), tokens_DV)
    return {"size": len(tokens_DV), "vocab_size": vocab, "training": training, "held_out": held_out}


def describe_coverage(report: dict[str, Any]) -> str:
    """Describe a `coverage_report`: ``2,048 of 4,096 tokens, 96.1 % of the label tokens (held out 95.8 %)``."""
    held_out = "" if report["held_out"] is None else f" (held out {report['held_out']:.1%})"
    return f"{report['size']:,} of {report['vocab_size']:,} tokens, {report['training']:.1%} of the label tokens{held_out}"
