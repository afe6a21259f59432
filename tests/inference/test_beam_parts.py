"""Parts of speculative beam search: the trie of a row's sequences, the features of its nodes, and how many drafts are worth verifying."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCAB, backbone, prompts

from headstart.heads.backbone.features import Features
from headstart.inference.beam.drafts import NodeFeatures, _corrected
from headstart.inference.beam.search import DEPTHS, UNITS, Breadth
from headstart.inference.beam.trie import BeamTrie, TopK, read_tries
from headstart.inference.capture.capture import Capturer
from headstart.inference.engine.reader import Reader
from headstart.inference.sources.levels import Level

NEXT = TopK(np.zeros(1), np.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_nodes_equal_their_sequences(family: str) -> None:
    """Several passes over rows of very different lengths; a short row's trie would not fit after a long row's last slots."""
    on, make = backbone(family), random.Random(0)
    texts = prompts((30, 3))
    reader, lengths_B = Reader(on, (), Capturer("off", torch.device("cpu"))), torch.tensor([30, 3])
    _, cache = reader.prompts(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), lengths_B)
    tries = [BeamTrie(30), BeamTrie(3)]
    ends = [[-1], [-1] * 6]  # six sequences in the second row
    for steps in (3, 2, 1, 2):
        for trie, last in zip(tries, ends, strict=True):
            trie.add(last[-1], VOCAB - 1)  # a dead end
            for _ in range(steps):
                last[:] = [trie.add(node, place * 10 + make.randrange(10)) for place, node in enumerate(last)]
        features, _ = read_tries(reader, cache, tries)
        for row, trie in enumerate(tries):
            for i, node in enumerate(range(trie.verified, len(trie.tokens))):
                text = texts[row].tolist() + trie.shared_tokens + [trie.tokens[above] for above in trie.path(node)]
                alone = on.read(torch.tensor([text])).hidden_BTD[0, -1]
                torch.testing.assert_close(features.hidden_BTD[row, i], alone, atol=1e-4, rtol=1e-4)
            trie.top_k += [NEXT] * trie.new
        paths = []
        for row, trie in enumerate(tries):
            kept, ends[row] = trie.keep(ends[row], [-1 for _ in ends[row]])
            paths.append(kept)
        cache.keep(paths)
        cache.lengths_B = torch.tensor([trie.shared for trie in tries])


def test_observed_top_k_replaces_drafts() -> None:
    tokens_BW, scores_BW = torch.arange(8).view(2, 4), -torch.arange(8.0).view(2, 4)
    level = Level(tokens_BW, torch.zeros_like(tokens_BW), scores_BW, scores_BW - 1)
    assert _corrected(level, [None, None]) is level
    corrected = _corrected(level, [None, TopK(np.array([-0.1, -0.2, -0.3], np.float32), np.array([50, 51, 52]), torch.zeros(3))])
    assert torch.equal(corrected.tokens_BW[0], tokens_BW[0]) and torch.equal(corrected.totals_BW[0], scores_BW[0] - 1)
    assert corrected.tokens_BW[1, :3].tolist() == [50, 51, 52] and corrected.scores_BW[1, :3].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert torch.equal(corrected.totals_BW[1], corrected.scores_BW[1]) and corrected.totals_BW[1, 3] < -1e8, "nothing else is drafted"


def test_a_trie_keeps_the_ancestors_of_its_beams() -> None:
    trie = BeamTrie(5)
    a = trie.add(-1, 7)
    b, c = trie.add(a, 1), trie.add(a, 2)
    d, e, f = trie.add(b, 3), trie.add(b, 4), trie.add(c, 3)
    assert trie.add(b, 3) == d and trie.find(c, 4) is None and trie.path(f) == [a, c, f]
    trie.top_k = [NEXT] * 6
    assert trie.keep([e, d, e], [9, 9, 8]) == ([a, b, d, e], [1, 0, 1])
    assert (trie.shared, trie.shared_tokens, trie.tokens, trie.parents, trie.verified) == (7, [7, 1], [3, 4], [-1, -1], 2)
    new = [trie.add(1, 8), trie.add(0, 8)]
    assert trie.new == 2 and trie.ancestors()[new[0]].tolist() == [False, True, True, False]
    trie.top_k = [NEXT] * 4
    assert trie.keep([1, 1], [8, 5]) == ([1, 2], [-1, -1]), "what was read ahead stays"
    assert (trie.shared, trie.tokens, trie.parents, trie.below([0])) == (8, [8], [-1], {0: 0})


def test_breadth_is_learned() -> None:
    breadth = Breadth(4)
    first = breadth.plans(3)
    assert len(first) == UNITS + 1 and first[2].widths == () and first[3].widths == (6,)
    assert all(len(plan.widths) <= 3 and sum(plan.widths) <= 2 * i for i, plan in enumerate(first))
    for _ in range(60):
        breadth.learn(0, 6)
        breadth.learn(1, None)
        breadth.fade()
    plans = breadth.plans(DEPTHS)
    assert plans[2].steps < 0.1 and plans[3].widths == (6,) and 0.9 < plans[3].steps < 1
    assert plans[UNITS].steps < 1.1, "the second depth is not worth its nodes"
    for _ in range(1500):
        breadth.fade()
    assert breadth.plans(3)[9].steps == pytest.approx(first[9].steps, rel=0.05), "what is long ago counts no more"


def test_features_of_nodes_by_row_and_number() -> None:
    """Rows keep different numbers of nodes; a node keeps its number when others are dropped."""

    def read(first: int) -> Features:
        tokens_BT = torch.arange(first, first + 6).view(2, 3)
        return Features(tokens_BT, tokens_BT[..., None].float(), {4: -tokens_BT[..., None].float()})

    kept = NodeFeatures(read(0))
    kept.add(read(10), [0, 0])  # tokens 10, 11, 12 and 13, 14, 15
    features = kept.of([1, 0, 1], [[2], [0, 1], []])
    assert features.tokens_BT[0, 0] == 15 and features.tokens_BT[1].tolist() == [10, 11] and features.lengths_B.tolist() == [1, 2, 0]
    kept.keep([[1, 2], [0]])
    kept.add(read(20), [2, 1])
    for row, numbers, tokens in ((0, [0, 1, 2, 4], [11, 12, 20, 22]), (1, [0, 1, 3], [13, 23, 25])):
        features = kept.of([row], [numbers])
        assert features.tokens_BT[0].tolist() == features.hidden_BTD[0, :, 0].tolist() == (-features.taps[4][0, :, 0]).tolist() == tokens
    kept.keep([[4], [0, 1]])
    kept.select([1])
    kept.add(read(30).rows(torch.tensor([1])), [2])
    assert kept.of([0], [[1, 2]]).tokens_BT.tolist() == [[23, 33]]
    kept.keep([[]])
    kept.add(read(40).rows(torch.tensor([0])), [0])
    assert kept.of([0], [[2]]).tokens_BT.tolist() == [[42]]
