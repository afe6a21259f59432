"""Proposers without training: the promises of each on any sequence; repeated sequences are proposed again."""

import math
import random

import pytest

from headstart.inference.engine.history import HistoryProposer
from headstart.inference.engine.proposer import MIN_PATH_PROB, Candidates, Proposer, grow
from headstart.inference.engine.recycling import NEWEST_WEIGHT, RecyclingProposer
from headstart.inference.engine.suffix import SuffixProposer
from headstart.support.errors import UserError

KINDS = [SuffixProposer, RecyclingProposer, HistoryProposer]
Path = tuple[int, ...]


def likely(draw: random.Random, letters: int) -> tuple[list[int], list[float]]:
    """Top eight next tokens and their log-probabilities, best first, as from a backbone."""
    weights = sorted((draw.random() ** 3 for _ in range(8)), reverse=True)
    return draw.sample(range(letters), 8), [math.log(weight / (sum(weights) + 0.1)) for weight in weights]


def show(proposer: Proposer, tokens: list[int], seed: int = 0) -> None:
    """Show the proposer a random top-k after each token."""
    draw = random.Random(seed)
    top_k = [likely(draw, 20) for _ in tokens]
    proposer.observe(tokens, [tokens for tokens, _ in top_k], [logprobs for _, logprobs in top_k])


def paths(candidates: Candidates) -> list[Path]:
    places: list[Path] = []
    for token, parent in zip(candidates.tokens, candidates.parents, strict=True):
        places.append((*(places[parent] if parent >= 0 else ()), token))
    return places


def chain(candidates: Candidates) -> Path:
    first = {parent: node for node, parent in reversed(list(enumerate(candidates.parents)))}
    tokens, at = [], -1
    while at in first:
        at = first[at]
        tokens.append(candidates.tokens[at])
    return tuple(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_forests_within_the_limits(kind: type[Proposer]) -> None:
    draw = random.Random(1)
    proposer = kind()
    sizes = set()
    for trial in range(60):
        letters = draw.choice([1, 2, 5, 20])
        proposer.open(trial % 3, [draw.randrange(letters) for _ in range(draw.choice([1, 2, 30, 200]))])
        show(proposer, [draw.randrange(letters) for _ in range(30)], trial)
        proposer.extend(trial % 3, [draw.randrange(letters) for _ in range(draw.randrange(1, 4))])
        depth, nodes = draw.randrange(0, 7), draw.randrange(0, 20)
        candidates = proposer.propose(trial % 3, depth, nodes)
        assert len(candidates.tokens) == len(candidates.parents) == len(candidates.scores) <= nodes
        assert all(-1 <= parent < node for node, parent in enumerate(candidates.parents))
        assert all(math.isfinite(score) and score <= 0 for score in candidates.scores)
        assert all(0 <= token < 20 for token in candidates.tokens)
        assert all(len(path) <= depth for path in paths(candidates))
        assert len(set(paths(candidates))) == len(candidates.tokens)
        for parent in {-1, *candidates.parents}:
            children = [math.exp(score) for score, above in zip(candidates.scores, candidates.parents, strict=True) if above == parent]
            assert sum(children) < 1
        sizes.add(len(candidates.tokens))
    assert max(sizes) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_known_nothing_proposed(kind: type[Proposer]) -> None:
    proposer = kind()
    proposer.open(0, [1, 2, 3, 4])
    assert proposer.propose(0, 5, 10) == Candidates([], [], [])
    proposer.extend(0, [5])
    assert proposer.propose(0, 5, 10) == Candidates([], [], [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_in_pieces_is_the_same_text(kind: type[Proposer]) -> None:
    draw = random.Random(2)
    text = [draw.randrange(3) for _ in range(120)]
    whole, pieces = kind(), kind()
    for proposer in (whole, pieces):
        proposer.open(0, text)
        show(proposer, text)
    whole.open(0, text)
    pieces.open(0, text[:7])
    at = 7
    while at < len(text):
        more = draw.randrange(1, 6)
        pieces.extend(0, text[at : at + more])
        at += more
    assert whole.propose(0, 6, 30) == pieces.propose(0, 6, 30)
    assert whole.propose(0, 6, 30).tokens


@pytest.mark.parametrize("kind", [SuffixProposer, RecyclingProposer])
def test_rows_do_not_disturb_each_other(kind: type[Proposer]) -> None:
    draw = random.Random(3)
    texts = [[draw.randrange(4) for _ in range(50)] for _ in range(3)]
    together = kind()
    show(together, list(range(4)))
    for row, text in enumerate(texts):
        together.open(row, text[:20])
    for i in range(20, 50):
        for row, text in enumerate(texts):
            together.extend(row, [text[i]])
    for row, text in enumerate(texts):
        alone = kind()
        show(alone, list(range(4)))
        alone.open(0, text)
        assert together.propose(row, 5, 12) == alone.propose(0, 5, 12)


def test_a_new_text_forgets_the_row_s_last() -> None:
    proposer = SuffixProposer()
    proposer.open(0, [1, 2, 3, 1, 2])
    assert chain(proposer.propose(0, 2, 4)) == (3, 1)
    proposer.open(0, [7, 1, 2])
    assert proposer.propose(0, 2, 4).tokens == []


def test_a_repeated_text_is_proposed_to_any_depth() -> None:
    text = list(range(100, 160))
    proposer = SuffixProposer()
    proposer.open(0, [*text, 7, *text[:20]])
    assert chain(proposer.propose(0, 30, 30)) == tuple(text[20:50])
    proposer.open(0, [1, 2, 3] * 5)
    assert chain(proposer.propose(0, 12, 40)) == (1, 2, 3) * 4


def test_only_the_end_of_a_long_prompt_is_known() -> None:
    proposer = SuffixProposer(longest=4)
    proposer.open(0, [1, 2, 9, 8, 5, 1])
    assert proposer.propose(0, 2, 4).tokens == []
    proposer.open(0, [9, 1, 2, 5, 1])
    assert chain(proposer.propose(0, 1, 4)) == (2,)


def test_recycling_proposes_the_observed_top_k_and_the_newest_wins() -> None:
    proposer = RecyclingProposer()
    proposer.open(0, [3, 5])
    proposer.observe([5, 6], [[6, 8], [7, 9]], [[-0.2, -2.0], [-0.1, -3.0]])
    candidates = proposer.propose(0, 2, 3)
    assert (candidates.tokens, candidates.parents) == ([6, 7, 8], [-1, 0, -1])
    assert candidates.scores == pytest.approx([math.log(NEWEST_WEIGHT) - 0.2, math.log(NEWEST_WEIGHT) - 0.1, math.log(NEWEST_WEIGHT) - 2.0])
    proposer.observe([5], [[8, 6]], [[-0.2, -2.0]])
    assert proposer.propose(0, 1, 1).tokens == [8]
    proposer.extend(0, [4, 6])
    assert proposer.propose(0, 1, 1).tokens == [7]


def test_repeated_tokens_gain_probability_and_old_ones_lose_it() -> None:
    proposer = RecyclingProposer()
    proposer.open(0, [5])
    first, second = [6, 7], [8, 7]
    probs = []
    for tokens in (first, first, first, second, second, second):
        proposer.observe([5], [tokens], [[-0.1, -3.0]])
        candidates = proposer.propose(0, 1, 4)
        probs.append({token: math.exp(score) for token, score in zip(candidates.tokens, candidates.scores, strict=True)})
    assert probs[0][6] < probs[1][6] < probs[2][6] < 1
    assert probs[3][6] < probs[3][8]
    assert 6 not in probs[5] and probs[5][8] == pytest.approx(probs[2][6])


def test_history_continues_as_earlier_sequences_did() -> None:
    proposer = HistoryProposer()
    proposer.open(0, [1, 2, 3, 4])
    proposer.extend(0, [5, 6])
    proposer.open(1, [9, 2, 3])
    assert proposer.propose(1, 3, 3).tokens == []  # row 0 is still active
    proposer.open(0, [8, 2, 3])
    assert chain(proposer.propose(0, 4, 4)) == (4, 5, 6)
    assert proposer.propose(0, 4, 4) == proposer.propose(1, 4, 4)


def test_history_starts_over_when_it_is_full() -> None:
    proposer = HistoryProposer(tokens=10)
    texts = [[1, 2, 3, 4], [5, 6, 7, 8], [11, 12, 13, 14], list(range(20, 50))]
    for text in [*texts[:3], [0]]:
        proposer.open(0, text)
    known = []
    for text in texts[:3]:
        proposer.open(1, text[:2])
        known.append(chain(proposer.propose(1, 1, 1)))
    assert known == [(), (), (13,)]
    for text in (texts[3], [0, 45]):
        proposer.open(0, text)
    assert chain(proposer.propose(0, 9, 9)) == (46, 47, 48, 49)


@pytest.mark.parametrize("make", [lambda: SuffixProposer(longest=0), lambda: HistoryProposer(tokens=-1)])
def test_sizes_are_counts(make: type[Proposer]) -> None:
    with pytest.raises(UserError, match="whole number of at least 1"):
        make()


@pytest.mark.parametrize("nodes", [1, 5, 80])
def test_growth_takes_the_nodes_of_largest_path_probability(nodes: int) -> None:
    """Compared with all possible paths."""

    def expand(place: Path, least: float = 0.0) -> list[tuple[int, float, Path]]:
        draw = random.Random(str(place))
        weights = [draw.random() ** 2 for _ in range(3)]
        probs = [weight / (sum(weights) + 0.2) for weight in weights]
        return [(token, prob, (*place, token)) for token, prob in enumerate(probs) if prob >= least]

    path_prob: dict[Path, float] = {(): 1.0}
    for depth in range(4):
        for place in [place for place in path_prob if len(place) == depth]:
            path_prob |= {after: path_prob[place] * prob for _, prob, after in expand(place)}
    best = [place for place in sorted(path_prob, key=lambda place: -path_prob[place]) if path_prob[place] >= MIN_PATH_PROB][1 : nodes + 1]
    candidates = grow((), expand, 4, nodes)
    assert paths(candidates) == best
    assert candidates.scores == pytest.approx([math.log(path_prob[place] / path_prob[place[:-1]]) for place in best])
    assert len(best) == nodes or path_prob[best[-1]] < 2 * MIN_PATH_PROB
