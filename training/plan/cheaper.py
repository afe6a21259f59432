"""Cheaper settings of a drafter: a smaller draft vocabulary and a smaller depth, what they save, and what they cost in acceptance.

In a step every label token is read out at each depth, forwards and backwards, and with ``objective.depth_weights: expected`` once more
before. For a small backbone with a large vocabulary that is most of the arithmetic, and on a CPU most of the time.
"""

from __future__ import annotations

from typing import Any

from headstart.heads.base import Drafter
from headstart.training.data.data import coverage_report, label_counts, most_frequent
from headstart.training.data.kept import Splits
from headstart.training.plan.compute import active_parameters
from headstart.training.plan.fake_model import FakeModels
from headstart.training.recipe.drafter import VOCABULARY_KEY
from headstart.training.recipe.recipe import Recipe

VOCABULARY, DEPTH = 8192, 4
"""What is proposed, where a recipe drafts at least twice as many tokens, and has more depths."""
LEAST = 1 / 3
"""Share of a step's arithmetic that readouts take, from which on it is."""
KINDS = ("eagle", "eagle3")
"""Drafters whose one layer is passed through for each depth."""
FORWARD, STEP = 2, 6
"""Operations for each weight and token: of a forward pass, and of forward and backward."""


def cheaper(recipe: Recipe, models: FakeModels, splits: Splits | None) -> dict[str, Any] | None:
    """Return the share of the readouts in the arithmetic of a step, and cheaper settings with their arithmetic relative to the recipe's.

    ``coverage``: share of the label tokens that the smaller vocabulary has, of held-out ones if there are any; None without data. None in
    all where nothing is proposed: for other kinds of drafters, or where readouts are a lesser part.
    """
    if recipe.drafter.get("kind") not in KINDS:
        return None
    [drafter] = models.drafters.values()
    vocab, depth = models.backbone.vocab, drafter.depth
    now = vocab if drafter.vocabulary is None else len(drafter.vocabulary)
    share = 1.0 if splits is None else splits.stats.label_tokens / splits.stats.tokens
    expected = recipe.objective.depth_weights == "expected"
    read = share * (STEP + FORWARD if expected else STEP), share * FORWARD
    whole, readouts = arithmetic(models, drafter, read, (depth, now))
    if now < 2 * VOCABULARY or readouts < LEAST * whole:
        return None
    smaller: dict[str, int] = {VOCABULARY_KEY: VOCABULARY}
    settings = [smaller, {"depth": DEPTH}, {**smaller, "depth": DEPTH}] if depth > DEPTH else [smaller]
    shapes = [(one.get("depth", depth), one.get(VOCABULARY_KEY, now)) for one in settings]
    costs = [arithmetic(models, drafter, read, shape)[0] / whole for shape in shapes]
    return {
        "operations_per_token": round(whole), "readouts": readouts / whole, "depth": depth, "vocab_size": now,
        "settings": [{"values": one, "arithmetic": cost} for one, cost in zip(settings, costs, strict=True)],
        "coverage": _coverage(splits, vocab),
    }  # fmt: skip


def arithmetic(models: FakeModels, drafter: Drafter, read: tuple[float, float], shape: tuple[int, int]) -> tuple[float, float]:
    """Return the operations a token of a step, and those of the drafts' readouts, with a depth and draft vocabulary of ``shape``.

    ``read``: operations for each weight of a readout and token, of the drafts' and the teacher's. Besides, products with the weights of the
    backbone's layers, forwards, and of the drafter's, forwards and backwards, are counted.
    """
    backbone, (depth, tokens) = models.backbone, shape
    vocabulary = backbone.vocab if drafter.vocabulary is None else len(drafter.vocabulary)
    layer = sum(weight.numel() for weight in drafter.parameters() if weight.requires_grad and vocabulary not in weight.shape)
    readouts, teacher = read[0] * depth * tokens * drafter.width, read[1] * backbone.vocab * backbone.dim
    forward = FORWARD * active_parameters(backbone.layers, backbone.config.to_dict()) if backbone.whole else 0
    other = forward + STEP * depth * layer
    return other + teacher + readouts, readouts


def _coverage(splits: Splits | None, vocab: int) -> float | None:
    if splits is None:
        return None
    counts = label_counts(splits, vocab)
    report = coverage_report(counts, most_frequent(counts.training_V, VOCABULARY))
    return float(report["training"] if report["held_out"] is None else report["held_out"])
