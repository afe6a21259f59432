"""The chunked objective against a naive one that holds everything, in float64; and what it counts.

Shape suffixes: B batch, T positions, D width, V vocabulary, K depth.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.heads.backbone import Backbone
from headstart.heads.base import Drafter, Features, build_drafter
from headstart.training.objective import Sums, count_learned, objective
from headstart.training.recipe import Objective

V, B, T = 53, 3, 19


class Guess(Drafter):
    """The least that is a drafter, with a hidden state of its own width; it corrects by the parent token as some heads do."""

    def __init__(self, backbone: Backbone, depth: int, vocabulary: Tensor | None) -> None:
        super().__init__(backbone)
        self.depth, self.vocabulary = depth, vocabulary
        self.mix = nn.ModuleList(nn.Linear(backbone.dim, 12) for _ in range(depth))
        self.head = nn.Linear(12, backbone.vocab if vocabulary is None else len(vocabulary))
        self.correction = nn.Embedding(backbone.vocab, 12)
        self.largest = 0

    def forward(self, features: Features) -> list[Tensor]:
        length = features.tokens_BT.shape[1]
        return [mix(features.hidden_BTD[:, : max(length - 2 - k, 0)]).tanh() for k, mix in enumerate(self.mix)]

    def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
        assert parent_tokens is not None
        self.largest = max(self.largest, len(hidden))
        return self.head(hidden + self.correction(parent_tokens))


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2, initializer_range=0.5,
        max_position_embeddings=64,
    )  # fmt: skip
    return Backbone(LlamaForCausalLM(config).double())


def batch(backbone: Backbone) -> Features:
    """Two documents in the first row, padding in the second, holes in what is to be learned."""
    generator = torch.Generator().manual_seed(1)
    features = backbone.read(torch.randint(0, V, (B, T), generator=generator))
    document = torch.zeros(B, T, dtype=torch.int64)
    document[0, 8:] = 1
    document[1, 11:] = -1
    learn = torch.rand(B, T, generator=generator) < 0.7
    return replace(features, learn_BT=learn, document_BT=document)


def learned(features: Features) -> int:
    assert features.learn_BT is not None and features.document_BT is not None
    return int(count_learned(features.learn_BT, features.document_BT))


def naive(wanted: Objective, backbone: Backbone, drafter: Drafter, features: Features, hidden: list[Tensor]) -> Sums:
    """By the book: a loop over rows, depths and positions, with whole distributions. The slow reference."""
    loss = torch.zeros((), dtype=torch.float64)
    count, correct, overlap = (torch.zeros(drafter.depth, dtype=torch.float64) for _ in range(3))
    tokens, learn, document = features.tokens_BT, features.learn_BT, features.document_BT
    assert learn is not None and document is not None
    ids = torch.arange(V) if drafter.vocabulary is None else drafter.vocabulary
    for b in range(B):
        for k in range(drafter.depth):
            for t in range(T - 2 - k):
                drafted = t + 2 + k
                if not learn[b, drafted] or not document[b, t] == document[b, drafted] != -1:
                    continue
                p = backbone.readout(features.hidden_BTD[b, t + 1 + k]).softmax(-1)
                log_q = drafter.readout(hidden[k][b, t][None], k, tokens[b, drafted - 1][None])[0].log_softmax(-1)
                kl = (p[ids] * (p[ids].log() - log_q)).sum()
                place = (ids == tokens[b, drafted]).nonzero()
                ce = -log_q[place[0, 0]] if len(place) else 0.0
                loss = loss + wanted.depth_decay**k * (wanted.terms.get("kl", 0) * kl + wanted.terms.get("ce", 0) * ce)
                count[k] += 1
                correct[k] += ids[log_q.argmax()] == p.argmax()
                overlap[k] += torch.minimum(p[ids], log_q.exp()).sum().detach()
    return Sums(loss, count, correct, overlap)


@pytest.mark.parametrize("vocabulary", [None, torch.arange(1, V, 2)], ids=["whole", "draft"])
@pytest.mark.parametrize("terms", [{"kl": 1.0}, {"ce": 1.0}, {"kl": 0.7, "ce": 0.3}], ids=str)
def test_same_as_naive_forward_and_backward(backbone: Backbone, terms: dict[str, float], vocabulary: Tensor | None) -> None:
    torch.manual_seed(2)
    drafter = Guess(backbone, 3, vocabulary).double()
    features = batch(backbone)
    results = []
    for way, chunk in ((naive, 1), (objective, 7), (objective, 10_000)):
        drafter.zero_grad()
        sums = way(Objective(terms=terms, depth_decay=0.6, chunk=chunk), backbone, drafter, features, drafter(features))
        sums.loss.backward()
        results.append([x.detach().double() for x in sums] + [p.grad.clone() for p in drafter.parameters() if p.grad is not None])
    for other in results[1:]:
        assert len(other) == len(results[0])
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert results[0][1][0] == learned(features) > 0


def test_gradients_are_right_by_finite_differences(backbone: Backbone) -> None:
    torch.manual_seed(3)
    drafter = Guess(backbone, 2, None).double()
    features = batch(backbone)
    wanted = Objective(terms={"kl": 0.5, "ce": 0.5}, chunk=5)
    weight = drafter.head.weight

    def loss(values: Tensor) -> Tensor:
        return torch.func.functional_call(Module(drafter, wanted, backbone, features), {"drafter.head.weight": values})

    assert torch.autograd.gradcheck(loss, (weight.detach().clone().requires_grad_(),), fast_mode=True)


class Module(nn.Module):
    """The objective as a function of the drafter's weights."""

    def __init__(self, drafter: Drafter, wanted: Objective, backbone: Backbone, features: Features) -> None:
        super().__init__()
        self.drafter, self.rest = drafter, (wanted, backbone, features)

    def forward(self) -> Tensor:
        wanted, backbone, features = self.rest
        return objective(wanted, backbone, self.drafter, features, self.drafter(features)).loss


def test_logits_are_never_held_whole(backbone: Backbone) -> None:
    """No readout, forward or backward, of more positions than a chunk; the backbone's once a chunk, not once a depth.

    A chunk that is alone is not computed again for the backward.
    """
    drafter = Guess(backbone, 3, None).double()
    features = batch(backbone)
    seen: list[int] = []
    hook = backbone.unembed.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    objective(Objective(chunk=4), backbone, drafter, features, drafter(features)).loss.backward()
    assert drafter.largest == max(seen) == 4
    assert sum(seen) == 2 * learned(features)   # forward, and again for the backward
    seen.clear()
    objective(Objective(chunk=1000), backbone, drafter, features, drafter(features)).loss.backward()
    assert seen == [learned(features)]
    hook.remove()


def test_a_batch_with_nothing_to_learn_still_reaches_every_parameter(backbone: Backbone) -> None:
    """Data parallelism waits for the gradient of every parameter, also from a process whose share teaches nothing."""
    drafter = Guess(backbone, 3, None).double()
    for length in (1, 2, 4, 6):
        drafter.zero_grad()
        zeros = torch.zeros(1, length, dtype=torch.int64)
        features = replace(backbone.read(zeros), learn_BT=zeros.bool(), document_BT=zeros)
        sums = objective(Objective(terms={"kl": 1.0, "ce": 1.0}), backbone, drafter, features, drafter(features))
        sums.loss.backward()
        assert sums.loss == 0 and not sums.count_K.any()
        assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


SHIPPED = [("medusa", {"depth": 2}), ("eagle3", {"depth": 3}), ("eagle3", {"depth": 2, "draft_vocab": 20})]


@pytest.mark.parametrize(("kind", "arguments"), SHIPPED)
def test_shipped_heads_same_as_naive(backbone: Backbone, kind: str, arguments: dict[str, int]) -> None:
    torch.manual_seed(4)
    drafter = build_drafter(kind, backbone, arguments).double()
    features = batch(backbone)
    features = replace(backbone.read(features.tokens_BT, taps=drafter.taps), learn_BT=features.learn_BT, document_BT=features.document_BT)
    wanted = Objective(terms={"kl": 0.5, "ce": 0.5}, chunk=6)
    fast = objective(wanted, backbone, drafter, features, drafter(features))
    slow = naive(wanted, backbone, drafter, features, drafter(features))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-10, atol=1e-10)


def test_a_perfect_draft_has_no_divergence_left(backbone: Backbone) -> None:
    """Alignment: a drafter that hands back the backbone's own state of position t+1+k is always right, at every depth."""

    class Oracle(Guess):
        def forward(self, features: Features) -> list[Tensor]:
            return [features.hidden_BTD[:, 1 + k : -1] for k in range(self.depth)]

        def readout(self, hidden: Tensor, depth: int, parent_tokens: Tensor | None = None) -> Tensor:
            return backbone.readout(hidden)

    features = batch(backbone)
    drafter = Oracle(backbone, 3, None)
    sums = objective(Objective(), backbone, drafter, features, drafter(features))
    torch.testing.assert_close(sums.loss, torch.zeros_like(sums.loss), atol=1e-9, rtol=0)
    assert torch.equal(sums.correct_K, sums.count_K)
    torch.testing.assert_close(sums.overlap_K, sums.count_K.double())


def test_the_dtype_of_the_softmax_is_at_least_fp32(backbone: Backbone) -> None:
    drafter = Guess(backbone, 1, None).bfloat16()
    features = batch(backbone)
    hidden = [h.bfloat16() for h in Guess(backbone, 1, None).double()(features)]
    assert objective(Objective(), backbone, drafter, features, hidden).overlap_K.dtype == torch.float64   # the teacher's
    assert F.log_softmax(torch.zeros(2, dtype=torch.bfloat16), -1).dtype == torch.bfloat16   # why it must be asked for
