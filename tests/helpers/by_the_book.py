"""Reference implementation of the objective's terms: their formulas for one position, with autograd, in float64.

Shape suffixes: V draft vocabulary, D width.
"""

import math

import torch
from torch import Tensor

from headstart.training.recipe.recipe import Objective

WHOLE_TERMS = [
    {"kl": 1.0}, {"reverse_kl": 1.0}, {"js": 1.0}, {"ce": 1.0}, {"tv": 1.0}, {"lk_alpha": 1.0}, {"lk": 1.0}, {"topk_kl": 1.0},
]  # fmt: skip
MIXED_TERMS = [{"kl": 0.7, "ce": 0.3}, {"ce": 0.1, "tv": 0.9}, {"lk": 0.5, "js": 2.0, "topk_kl": 0.25, "reverse_kl": 0.0}]


def term(name: str, p_V: Tensor, log_q_V: Tensor, choice: int | None, wanted: Objective) -> Tensor:
    """``p_V``: the backbone's probabilities over the draft vocabulary, not renormalised; ``choice``: its argmax there, if present."""
    q_V = log_q_V.exp()
    alpha = torch.minimum(p_V, q_V).sum()
    kl = (p_V * (p_V.log() - log_q_V)).sum()
    if name == "kl":
        return kl
    if name == "reverse_kl":
        return (q_V * (log_q_V - p_V.log())).sum()
    if name == "js":
        h_V = (p_V + q_V) / 2
        outside = (1 - p_V.sum()) * math.log(2)  # the part of KL(p | h) where q is 0
        return ((p_V * (p_V / h_V).log()).sum() + outside + (q_V * (q_V / h_V).log()).sum()) / 2
    if name == "ce":
        return log_q_V.new_zeros(()) if choice is None else -log_q_V[choice]
    if name == "tv":
        return 1 - alpha
    if name == "lk_alpha":
        return -alpha.log()
    if name == "lk":
        weight = math.exp(-wanted.lk_eta * alpha.item())
        return weight * kl + (1 - weight) * (1 - alpha)
    assert name == "topk_kl"
    return topk_kl(p_V, q_V, wanted.top_k)


def topk_kl(p_V: Tensor, q_V: Tensor, k: int) -> Tensor:
    top = p_V.sort(descending=True).indices[:k]
    rest = torch.ones_like(p_V, dtype=torch.bool)
    rest[top] = False
    total = (p_V[top] * (p_V[top] / q_V[top]).log()).sum()
    if rest.any():
        total = total + p_V[rest].sum() * (p_V[rest].sum() / q_V[rest].sum()).log()
    return total


def mixture(p_V: Tensor, log_q_V: Tensor, choice: int | None, wanted: Objective) -> Tensor:
    """Weighted sum of the recipe's terms that compare distributions (all but ``features``)."""
    parts = [weight * term(name, p_V, log_q_V, choice, wanted) for name, weight in wanted.terms.items() if weight and name != "features"]
    return torch.stack(parts).sum() if parts else log_q_V.new_zeros(())


def smooth_l1(drafted_D: Tensor, hidden_D: Tensor) -> Tensor:
    apart_D = (drafted_D - hidden_D).abs()
    return torch.where(apart_D < 1, apart_D.square() / 2, apart_D - 0.5).mean()


def dpace(confidence: list[float | None]) -> list[float]:
    """The ``dpace`` depth weights (2605.18810) with smoothing 0.5; None marks a depth without a label."""
    weights = []
    for k in range(len(confidence)):
        total = 0.0
        for j in range(k, len(confidence)):
            if confidence[j] is not None:
                total += math.prod(0.5 + 0.5 * prob for prob in confidence[: j + 1] if prob is not None)
        weights.append(total if confidence[k] is not None else 0.0)
    return weights
