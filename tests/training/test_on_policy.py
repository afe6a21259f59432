"""On-policy training: the targets of drafts, their states, their loss, and independence of how a step is split.

Shape suffixes: B batch, T positions, M drafts, N proposals of a draft, K depth, D width.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, backbone, following, random_drafter, texts
from guess import mixture, small_backbone
from torch import Tensor

from headstart import Backbone, Drafter, Features
from headstart.heads.methods import build_drafter
from headstart.support.pytree import map_tensors
from headstart.training.data.batches import collate
from headstart.training.data.data import Sample
from headstart.training.features.source import FeaturesWithCache, LiveWithCache
from headstart.training.objective.fused import FusedLoss
from headstart.training.objective.loss_rows import SampledAnchors, StepKey, count_label_tokens, sample_anchors
from headstart.training.objective.objective import on_policy_loss, rollout, target_hidden
from headstart.training.recipe.recipe import Objective

LENGTHS, ROWS = (9, 4, 13, 6, 21, 5, 8), [[0, 1, 2], [3, 4], [5, 6]]
ALONE = [[i] for i in range(len(LENGTHS))]
KEY = StepKey(seed=3, step=5)
CLOSE = {"atol": 3e-5, "rtol": 1e-4}
FOLLOWING = [*following(3), ("eagle3", {"draft_vocab_size": 23, "depth": 3})]


def samples(lengths: tuple[int, ...] = LENGTHS, vocab: int = VOCAB) -> list[Sample]:
    make = torch.Generator().manual_seed(0)
    learn = [torch.rand(length, generator=make) < 0.8 for length in lengths]
    return [Sample(torch.randint(1, vocab, (len(mask),), generator=make), mask) for mask in learn]


def with_kv(on: Backbone, drafter: Drafter, rows: list[list[int]], vocab: int = VOCAB) -> FeaturesWithCache:
    return LiveWithCache(on, drafter.taps).read(collate(samples(vocab=vocab), rows))


def each_draft(anchors: SampledAnchors) -> list[tuple[int, int, int, int]]:
    """The number, row, t and document start of each draft."""
    columns = anchors.at.row_M.tolist(), anchors.at.position_M.tolist(), anchors.first_M.tolist()
    return [(m, *place) for m, place in enumerate(zip(*columns, strict=True))]


@pytest.mark.matrix
@pytest.mark.parametrize("rows", [ROWS, ALONE], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_target_hidden_is_that_of_each_draft_in_its_sequence(family: str, rows: list[list[int]]) -> None:
    on = backbone(family)
    features, N = with_kv(on, random_drafter("medusa", on), rows), 6  # gemma3's windows are shorter
    anchors = sample_anchors(features, N + 1, 0.5, KEY, first_depth=1)
    guesses_MN = texts(len(anchors), N, seed=9)
    assert len(guesses_MN) > 12
    for _ in range(2):  # reading does not change the cache
        heard_MND = target_hidden(on, features, anchors.at, guesses_MN)
        for m, row, t, first in each_draft(anchors):
            text = torch.cat([features.tokens_BT[row, first : t + 2], guesses_MN[m]])[None]
            alone_ND = on.read(text).hidden_BTD[0, -N:]
            torch.testing.assert_close(heard_MND[m], alone_ND, atol=1e-5 * max(alone_ND.abs().max().item(), 1.0), rtol=1e-4)


def test_long_sequences_are_prefilled_in_pieces() -> None:
    """Rows of very different lengths: a row's pieces are padded past the room the drafter had reserved."""
    on = backbone("llama")
    drafter, lengths = random_drafter("eagle3", on, depth=2), (190, 130, 200, 64)
    features = LiveWithCache(on, drafter.taps).read(collate(samples(lengths), [[0], [1], [2], [3]]))
    for step in range(6):
        anchors = sample_anchors(features, 2, 0.03, StepKey(0, step), first_depth=1)
        hidden = rollout(FusedLoss(Objective(on_policy=1.0), drafter), features, anchors)[1][0]
        for m, row, t, first in each_draft(anchors):
            text = Features(features.tokens_BT, features.hidden_BTD, features.taps).rows(torch.tensor([row]))
            state = drafter.begin(map_tensors(lambda x, part=slice(first, t + 1): x[:, part], text))
            token = features.tokens_BT[row, t + 1].view(1, 1)
            decoded, _ = drafter.step(drafter.reserve(state, t + 3), token, torch.zeros_like(token), 0)
            torch.testing.assert_close(hidden[m], decoded[0, 0], **CLOSE)


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "arguments"), FOLLOWING, ids=str)
@pytest.mark.parametrize("rows", [ROWS, ALONE], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_states_are_decoding_states(family: str, rows: list[list[int]], kind: str, arguments: dict[str, Any]) -> None:
    """The hidden states that carry gradients equal those of `begin` and `step` for each draft alone."""
    on = backbone(family)
    drafter = random_drafter(kind, on, **arguments).requires_grad_(True)
    features, wanted = with_kv(on, drafter, rows), Objective(on_policy=1.0, on_policy_temperature=0.0)
    anchors = sample_anchors(features, drafter.trained_depth, 0.6, KEY, first_depth=1)
    guesses_MN, hidden = rollout(FusedLoss(wanted, drafter), features, anchors)
    assert all(one.requires_grad for one in hidden)
    with torch.no_grad():
        for m, row, t, first in each_draft(anchors):
            text = Features(features.tokens_BT, features.hidden_BTD, features.taps).rows(torch.tensor([row]))
            state = drafter.begin(map_tensors(lambda x, part=slice(first, t + 1): x[:, part], text))
            state, token = drafter.reserve(state, t + 1 + drafter.trained_depth), features.tokens_BT[row, t + 1].view(1, 1)
            for k in range(drafter.trained_depth):
                decoded, state = drafter.step(state, token, torch.zeros_like(token), k)
                torch.testing.assert_close(hidden[k][m], decoded[0, 0], **CLOSE)
                if k + 1 < drafter.trained_depth:
                    place = drafter.readout(decoded, k, token).argmax(-1)
                    token = place if drafter.vocabulary is None else drafter.vocabulary[place]
                    assert token.item() == guesses_MN[m, k]


def drafting(vocabulary: int | None = None, layers: int = 1) -> tuple[Backbone, Drafter]:
    on = small_backbone()
    torch.manual_seed(4)
    return on, build_drafter("eagle3", on, {"depth": 3, "draft_vocab_size": vocabulary, "layers": layers}).double()


def naive(wanted: Objective, on: Backbone, drafter: Drafter, features: FeaturesWithCache) -> Tensor:
    """Slow reference: each draft alone, whole distributions, autograd."""
    anchors = sample_anchors(features, drafter.trained_depth, wanted.on_policy_share, KEY, first_depth=1)
    loss = torch.zeros((), dtype=torch.float64)
    guesses_MN, _ = rollout(FusedLoss(wanted, drafter), features, anchors)
    ids = torch.arange(on.vocab) if drafter.vocabulary is None else drafter.vocabulary
    for m, row, t, first in each_draft(anchors):
        text = features.tokens_BT[row, first : t + 2]
        state, token = drafter.begin(on.read(text[None, :-1], taps=drafter.taps)), text[-1].view(1, 1)
        for k in range(drafter.trained_depth):
            state = map_tensors(torch.clone, state)  # a step writes in place into what `begin` or the last step need for their gradients
            hidden, state = drafter.step(state, token, torch.zeros_like(token), k)
            if k and anchors.counts_MK[m, k]:
                p_V = on.readout(on.read(text[None]).hidden_BTD[0, -1]).softmax(-1)
                log_q_V = drafter.readout(hidden, k, token)[0, 0].log_softmax(-1)
                choice = (ids == p_V.argmax()).nonzero().flatten().tolist()
                weight = wanted.on_policy / wanted.on_policy_share * wanted.depth_decay**k
                loss = loss + weight * mixture(p_V[ids], log_q_V, choice[0] if choice else None, wanted)
            if k + 1 < drafter.trained_depth:
                token = guesses_MN[m, k].view(1, 1)
                text = torch.cat([text, token[0]])
    return loss


@pytest.mark.matrix
@pytest.mark.parametrize("vocabulary,layers", [(None, 1), (20, 1), (None, 2)])
@pytest.mark.parametrize("terms", [{"kl": 1.0}, {"ce": 0.3, "tv": 0.7}], ids=str)
def test_loss_and_gradients_are_those_by_the_book(terms: dict[str, float], vocabulary: int | None, layers: int) -> None:
    on, drafter = drafting(vocabulary, layers)
    features = with_kv(on, drafter, ROWS, vocab=on.vocab)
    wanted = Objective(terms=terms, on_policy=0.7, on_policy_share=0.4, depth_decay=0.6, chunk_size=7)
    pairs = []
    for way in (lambda: on_policy_loss(FusedLoss(wanted, drafter), features, KEY), lambda: naive(wanted, on, drafter, features)):
        drafter.zero_grad()
        (loss := way()).backward()
        pairs.append((loss.detach(), {name: weight.grad.clone() for name, weight in drafter.named_parameters() if weight.grad is not None}))
    torch.testing.assert_close(pairs[0][0], pairs[1][0], rtol=1e-10, atol=1e-10)
    assert pairs[0][0] > 0 and pairs[0][1].keys() == pairs[1][1].keys() == dict(drafter.named_parameters()).keys()
    for name, gradient in pairs[0][1].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, pairs[1][1][name], rtol=1e-8, atol=1e-10)
    assert all(weight.grad is None for weight in on.model.parameters())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sum_does_not_depend_on_how_documents_lie(temperature: float) -> None:
    on, drafter = drafting()
    wanted = Objective(on_policy=1.0, on_policy_share=0.4, on_policy_temperature=temperature)
    layouts = [[ROWS], [ALONE], [[row] for row in ROWS], [[row] for row in reversed(ALONE)]]
    loss = FusedLoss(wanted, drafter)
    losses = [sum(on_policy_loss(loss, with_kv(on, drafter, rows, on.vocab), KEY).item() for rows in cut) for cut in layouts]
    assert losses == pytest.approx([losses[0]] * len(layouts), rel=1e-9) and losses[0] > 0


def test_drafts_begin_at_sampled_label_positions_alone() -> None:
    on, drafter = drafting()
    features, counts = with_kv(on, drafter, ROWS, on.vocab), {}
    assert features.loss_mask_BT is not None and features.document_BT is not None
    for seed in range(3):
        for step in range(40):
            anchors = sample_anchors(features, 3, 0.25, StepKey(seed, step), first_depth=1)
            counts[seed, step] = tuple(zip(anchors.at.row_M.tolist(), anchors.at.position_M.tolist(), strict=True))
            assert anchors.counts_MK[:, 1:].any(1).all()
            for k in range(3):
                ahead = (anchors.at.position_M + 2 + k).clamp(max=features.tokens_BT.shape[1] - 1)
                assert (features.loss_mask_BT[anchors.at.row_M, ahead] | ~anchors.counts_MK[:, k]).all()
    possible = len(sample_anchors(features, 3, 1.0, KEY, first_depth=1))
    drawn = sum(map(len, counts.values())) / len(counts)
    assert len(set(counts.values())) == len(counts) and possible <= int(count_label_tokens(features.loss_mask_BT, features.document_BT)) + 7
    assert drawn == pytest.approx(0.25 * possible, rel=0.1)


def test_the_expected_loss_does_not_depend_on_the_share() -> None:
    on, drafter = drafting()
    features = with_kv(on, drafter, ROWS, on.vocab)
    with torch.no_grad():
        loss = {share: FusedLoss(Objective(on_policy=1.0, on_policy_share=share), drafter) for share in (1.0, 0.3)}
        all_of_them = [on_policy_loss(loss[1.0], features, StepKey(0, step)) for step in range(8)]
        some = [on_policy_loss(loss[0.3], features, StepKey(1, step)) for step in range(60)]
    assert torch.stack(some).mean() == pytest.approx(torch.stack(all_of_them).mean().item(), rel=0.1)


def test_tokens_are_drawn_from_the_drafters_own_distribution() -> None:
    on, drafter = drafting()
    features = with_kv(on, drafter, ALONE, on.vocab)
    counts, q_V = torch.zeros(on.vocab), None
    for step in range(100):
        anchors = sample_anchors(features, 3, 1.0, StepKey(0, step), first_depth=1)
        with torch.no_grad():
            guesses_MN, hidden = rollout(FusedLoss(Objective(on_policy=1.0, on_policy_temperature=2.0), drafter), features, anchors)
        counts += torch.bincount(guesses_MN[:, 0], minlength=on.vocab)
        q_V = (drafter.readout(hidden[0], 0) / 2).softmax(-1).mean(0)  # the same at every step
    assert q_V is not None and (counts / counts.sum() - q_V).abs().sum() < 0.1 and (counts > 0).sum() > 20


def test_no_label_tokens_no_loss() -> None:
    on, drafter = drafting()
    features = with_kv(on, drafter, ROWS, on.vocab)
    assert features.loss_mask_BT is not None
    silent = replace(features, loss_mask_BT=torch.zeros_like(features.loss_mask_BT))
    assert on_policy_loss(FusedLoss(Objective(on_policy=1.0), drafter), silent, KEY) == 0
