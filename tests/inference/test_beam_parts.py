"""Parts of speculative beam search: the trie of a row's sequences, the features of its nodes, and how many drafts are worth verifying."""

import math

import pytest
import torch

from headstart.heads.backbone.features import Features
from headstart.inference.beam.drafts import Breadth, _corrected
from headstart.inference.beam.search import BeamTrie
from headstart.inference.engine.source import Level

NEXT = torch.zeros(1, 1)


def test_observed_top_k_replaces_drafts() -> None:
    tokens_BW, scores_BW = torch.arange(8).view(2, 4), -torch.arange(8.0).view(2, 4)
    level = Level(tokens_BW, torch.zeros_like(tokens_BW), scores_BW, scores_BW - 1)
    after_V = torch.full((60,), -math.inf)
    after_V[[50, 51, 52]] = torch.tensor([-0.1, -0.2, -0.3])
    corrected = _corrected(level, [None, after_V])
    assert torch.equal(corrected.tokens_BW[0], tokens_BW[0]) and torch.equal(corrected.totals_BW[0], scores_BW[0] - 1)
    assert corrected.tokens_BW[1, :3].tolist() == [50, 51, 52] and corrected.scores_BW[1, :3].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert torch.equal(corrected.totals_BW[1], corrected.scores_BW[1]) and corrected.totals_BW[1, 3] < -1e8, "nothing else is drafted"


def test_a_trie_keeps_the_ancestors_of_its_beams() -> None:
    trie = BeamTrie(5)
    a = trie.add(-1, 7)
    b, c = trie.add(a, 1), trie.add(a, 2)
    d, e, f = trie.add(b, 3), trie.add(b, 4), trie.add(c, 3)
    assert trie.add(b, 3) == d and (c, 4) not in trie.nodes and trie.path(f) == [a, c, f]
    trie.after = [NEXT] * 6
    assert trie.keep([e, d, e], [9, 9, 8]) == ([a, b, d, e], [1, 0, 1])
    assert (trie.shared, trie.shared_tokens, trie.tokens, trie.parents, trie.verified) == (7, [7, 1], [3, 4], [-1, -1], 2)
    new = [trie.add(1, 8), trie.add(0, 8)]
    assert trie.new == 2 and trie.ancestors()[new[0]].tolist() == [False, True, True, False]
    trie.after = [NEXT] * 4
    assert trie.keep([1, 1], [8, 5]) == ([1, 2], [-1, -1]), "what was read ahead stays"
    assert (trie.shared, trie.tokens, trie.parents) == (8, [8], [-1])


def test_breadth_is_learned() -> None:
    breadth = Breadth(4)
    first = breadth.steps(3, 40)
    assert first[0, 0] == first[1, 4] == 0 < first[1, 6] < first[1, 8] < first[2, 8]
    assert all(depths <= 3 and depths * width <= 40 for depths, width in first)
    for _ in range(60):
        breadth.learn(0, 6)
        breadth.learn(1, math.inf)
        breadth.fade()
    steps = breadth.steps(12, 72)
    assert steps[1, 4] < 0.1 and 0.9 < steps[1, 6] < 1
    assert max(steps.values()) < 1.1, "the second depth is not worth its nodes"
    for _ in range(2000):
        breadth.fade()
    assert breadth.steps(3, 40) == pytest.approx(first, rel=0.05), "what is long ago counts no more"


def test_features_of_paths() -> None:
    """Nodes keep their features when others are dropped; of a padded pass the first nodes count."""

    def read(first: int) -> Features:
        tokens_1N = torch.arange(first, first + 4)[None]
        return Features(tokens_1N, tokens_1N[..., None].float(), {4: -tokens_1N[..., None].float()})

    trie = BeamTrie(5)
    a, b, c = trie.add(-1, 1), trie.add(-1, 2), trie.add(-1, 3)
    trie.verify(NEXT.repeat(4, 1, 1), read(10))  # 10, 11, 12
    assert trie.along([[a], [c]], 1).tokens_BT.tolist() == [[10], [12]]
    _, (c, b) = trie.keep([c, b], [7, 7])
    d, e = trie.add(c, 7), trie.add(b, 7)
    trie.verify(NEXT.repeat(4, 1, 1), read(20))  # 20, 21
    features = trie.along([[c, d], [b, e]], 3)
    assert features.lengths_B.tolist() == [2, 2] and features.taps is not None
    for row, tokens in ((0, [12, 20]), (1, [11, 21])):
        for values in (features.tokens_BT[row], features.hidden_BTD[row, :, 0], -features.taps[4][row, :, 0]):
            assert values[:2].tolist() == tokens
