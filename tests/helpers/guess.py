"""A small drafter, a training batch, and a reference objective: a loop over positions with whole distributions.

Shape suffixes: B batch, T positions, D width.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from headstart import Backbone, Features
from headstart.heads.base import Drafter, DrafterConfig
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import count_label_tokens
from headstart.training.objective.objective import Sums, objective
from headstart.training.recipe.recipe import Objective

V, B, T = 53, 3, 19


class TinyDrafter(Drafter):
    """A minimal drafter with a hidden state of its own width; like some heads, it corrects by the parent token."""

    def __init__(self, backbone: Backbone, depth: int, vocabulary: Tensor | None) -> None:
        super().__init__(backbone, DrafterConfig(depth=depth))
        self.vocabulary = vocabulary
        self.mix = nn.ModuleList(nn.Linear(backbone.dim, 12) for _ in range(depth))
        self.head = nn.Linear(12, backbone.vocab if vocabulary is None else len(vocabulary))
        self.correction = nn.Embedding(backbone.vocab, 12)
        self.largest = 0

    def forward_dense(self, features: Features) -> list[Tensor]:
        length = features.tokens_BT.shape[1]
        return [mix(features.hidden_BTD[:, : max(length - 2 - k, 0)]).tanh() for k, mix in enumerate(self.mix)]

    def begin(self, features: Features, state: Tensor | None = None) -> Tensor:
        return features.hidden_BTD[:, -1:]

    def step(self, state: Tensor, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return self.mix[depth](state).tanh(), state

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        assert parent_tokens is not None
        self.largest = max(self.largest, len(hidden))
        return self.head(hidden + self.correction(parent_tokens))


@cache
def small_backbone(dtype: torch.dtype = torch.float64) -> Backbone:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2, initializer_range=0.5,
        max_position_embeddings=64,
    )  # fmt: skip
    return Backbone(LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False))


def batch(backbone: Backbone) -> Features:
    """Two documents in the first row, padding in the second, gaps in the loss mask."""
    generator = torch.Generator().manual_seed(1)
    features = backbone.read(torch.randint(0, V, (B, T), generator=generator))
    document = torch.zeros(B, T, dtype=torch.int64)
    document[0, 8:] = 1
    document[1, 11:] = -1
    learn = torch.rand(B, T, generator=generator) < 0.7
    return replace(features, loss_mask_BT=learn, document_BT=document)


def learned(features: Features) -> int:
    assert features.loss_mask_BT is not None and features.document_BT is not None
    return int(count_label_tokens(features.loss_mask_BT, features.document_BT))


def naive(wanted: Objective, backbone: Backbone, drafter: Drafter, features: Features, hidden: list[Tensor]) -> Sums:
    """Slow reference: a loop over rows, positions and depths, with whole distributions."""
    loss = torch.zeros((), dtype=torch.float64)
    count, correct, alpha = (torch.zeros(drafter.trained_depth, dtype=torch.float64) for _ in range(3))
    tokens, learn, document = features.tokens_BT, features.loss_mask_BT, features.document_BT
    assert learn is not None and document is not None
    ids = torch.arange(V) if drafter.vocabulary is None else drafter.vocabulary
    for b, t in [(b, t) for b in range(len(tokens)) for t in range(tokens.shape[1])]:
        values, sure = [], []
        for k in range(drafter.trained_depth):
            drafted = t + 2 + k
            if drafted >= tokens.shape[1] or not learn[b, drafted] or not document[b, t] == document[b, drafted] != -1:
                values, sure = [*values, torch.zeros(())], [*sure, None]
                continue
            target_D = features.hidden_BTD[b, drafted - 1]
            p = backbone.readout(target_D).softmax(-1)
            log_q = drafter.readout(hidden[k][b, t][None], k, tokens[b, drafted - 1][None])[0].log_softmax(-1)
            places = {int(token): place for place, token in enumerate(ids)}
            regressed = wanted.terms["features"] * smooth_l1(hidden[k][b, t], target_D) if "features" in wanted.terms else 0.0
            values.append(mixture(p[ids], log_q, places.get(int(p.argmax())), wanted) + regressed)
            text = places.get(int(tokens[b, drafted]))
            sure.append(0.0 if text is None else log_q[text].exp().item())
            count[k] += 1
            correct[k] += ids[log_q.argmax()] == p.argmax()
            alpha[k] += torch.minimum(p[ids], log_q.exp()).sum().detach()
        geometric = [wanted.depth_decay**k for k in range(drafter.trained_depth)]
        weights = geometric if wanted.depth_weights == "geometric" else dpace(sure)
        loss = loss + sum(weight * value for weight, value in zip(weights, values, strict=True))
    return Sums(loss, count, correct, alpha, torch.zeros_like(loss), torch.zeros_like(loss))


def chunked(wanted: Objective, backbone: Backbone, drafter: Drafter, features: Features, hidden: list[Tensor]) -> Sums:
    """The chunked objective, with the signature of `naive`."""
    return objective(FusedLoss(wanted, drafter), features, hidden)


def run(way: Callable[..., Sums], wanted: Objective, backbone: Backbone, drafter: Drafter, features: Features) -> list[Tensor]:
    """The sums and the gradient of every weight."""
    drafter.zero_grad()
    sums = way(wanted, backbone, drafter, features, drafter(features))
    sums.loss.backward()
    return [x.detach().double() for x in sums] + [p.grad.clone() for p in drafter.parameters() if p.grad is not None]


class Largest(TorchDispatchMode):
    """Number of elements in the largest tensor that any operation made, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


# Reference implementation of the objective's terms: their formulas for one position, with autograd, in float64.

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
