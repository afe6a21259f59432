"""Lookahead decoding: its window lies in the candidate tree, trajectories become n-grams, and no text changes."""

from __future__ import annotations

from headstart.inference.proposers.lookahead import LookaheadProposer
from headstart.inference.sources.proposer import Candidates

CYCLE = 7


def following(token: int) -> int:
    """A model that counts in a circle."""
    return (token + 1) % CYCLE


def verify(proposer: LookaheadProposer, text: list[int], candidates: Candidates) -> list[int]:
    """One decoding step with that model: returns the tokens written."""
    tokens, parents = [text[-1], *candidates.tokens], [0, *(parent + 1 for parent in candidates.parents)]
    picks, node, written = [following(token) for token in tokens], 0, []
    while True:
        written.append(picks[node])
        children = [child for child in range(1, len(tokens)) if parents[child] == node and tokens[child] == picks[node]]
        if not children:
            break
        node = children[0]
    proposer.extend(0, written)
    proposer.verified(0, tokens, parents, picks)
    return written


def test_the_window_is_a_comb_below_the_root() -> None:
    proposer = LookaheadProposer(window=3, ngram=3)
    proposer.open(0, [5])
    proposer.sequences[0].rows = [[1, 2, 3], [11, 12, 13]]
    drafted = proposer.propose(0, 9, 24)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(drafted.tokens, drafted.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert set(paths) == {(1,), (1, 2), (1, 2, 3), (1, 11), (1, 2, 12), (1, 2, 3, 13)}
    assert len(proposer.propose(0, 2, 24).tokens) == 3 and len(proposer.propose(0, 9, 2).tokens) == 2


def test_picks_behind_the_window_become_n_grams_and_its_last_row() -> None:
    proposer = LookaheadProposer(window=2, ngram=3)
    proposer.open(0, [5])
    one = proposer.sequences[0]
    one.rows = [[1, 2], [11, 12]]
    drafted = proposer.propose(0, 9, 24)
    tokens, parents = [5, *drafted.tokens], [0, *(parent + 1 for parent in drafted.parents)]
    proposer.extend(0, [9])
    proposer.verified(0, tokens, parents, [100 + token for token in tokens])
    assert one.rows == [[11, 12], [111, 112]] and {first: [*known] for first, known in one.pool.items()} == {1: [(11, 111)], 2: [(12, 112)]}
    proposer.extend(0, [1])
    assert (11, 111) == tuple(proposer.propose(0, 9, 24).tokens[:2]), "the text has reached an n-gram's first token"


def test_a_repeating_text_is_found_by_iteration_alone() -> None:
    proposer = LookaheadProposer()
    text, passes = [0, 3, 1, 5, 2, 6, 4, 0], 0
    proposer.open(0, [*text])
    while len(text) < 200:
        text += verify(proposer, text, proposer.propose(0, 12, 24))
        passes += 1
    assert all(after == following(before) for before, after in zip(text[7:], text[8:], strict=False)) and passes < 100


def test_columns_left_out_of_the_tree_keep_their_guesses() -> None:
    proposer = LookaheadProposer(window=2, ngram=3)
    proposer.open(0, [5])
    one = proposer.sequences[0]
    one.rows = [[1, 2], [11, 12]]
    proposer.extend(0, [9])
    proposer.verified(0, [5], [0], [9])
    assert not one.pool and one.rows == [[11, 12], [11, 12]]
