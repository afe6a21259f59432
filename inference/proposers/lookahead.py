"""Lookahead decoding (2402.02057): Jacobi iteration in the same pass that verifies drafts, whose trajectories fill a pool of n-grams.

A window of W columns and N-1 rows guesses the tokens after the root. Row 0 is a chain; below its column j, rows 1 to N-2 are a branch, so
the whole window is a part of the candidate tree and needs no mask of its own. What the backbone picks behind column j is the last token of
an n-gram, which enters the pool under its first token, and the guess of the next step's last row. Guesses are also candidates: they are
accepted where they happen to be right. Verified n-grams are proposed where the text reaches their first token.

The paper always computes its window. Here its nodes are paid for like any others: a row's tree takes those that are likely enough to be
accepted, and the source pauses where it costs more than it brings; columns that were not in the tree keep their guesses.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.inference.sources.proposer import Candidates, Proposer

WINDOW, NGRAM, POOLED = 4, 3, 4
"""Columns, tokens of an n-gram, and n-grams kept for a first token; the paper's 15, 5 and 15 are for GPUs, where further nodes are free."""
FIRST_TOKENS = 4096
"""First tokens that a pool holds; the one not seen for longest is dropped."""
FIRST, LATER, GUESSED = math.log(0.3), math.log(0.6), math.log(0.05)
"""Scores of an n-gram's first draft, of its later ones, and of guesses, before calibration."""


@dataclass
class Trajectory:
    """The window and the pool of one sequence."""

    tokens: list[int]
    """The sequence, from which guesses are drawn."""
    draw: random.Random
    rows: list[list[int]] = field(default_factory=list)
    """Guesses by row and column; row r, column j stands r + j + 1 tokens after the root."""
    pool: OrderedDict[int, deque[tuple[int, ...]]] = field(default_factory=OrderedDict)
    """What followed a token in trajectories, newest last."""
    written: int = 1
    """Tokens written by the last step."""

    def guess(self) -> int:
        return self.draw.choice(self.tokens)


class LookaheadProposer(Proposer):
    """Keeps a window and a pool for each sequence; both are functions of the sequence and of what was verified."""

    name = "lookahead"

    def __init__(self, window: int = WINDOW, ngram: int = NGRAM) -> None:
        self.window, self.ngram = window, ngram
        self.sequences: dict[int, Trajectory] = {}

    def open(self, sequence: int, tokens: list[int]) -> None:
        self.sequences[sequence] = one = Trajectory(list(tokens), random.Random(0))
        one.rows = [[one.guess() for _ in range(self.window)]]

    def extend(self, sequence: int, tokens: list[int]) -> None:
        self.sequences[sequence].tokens += tokens
        self.sequences[sequence].written = len(tokens)

    def propose(self, sequence: int, depths: int, nodes: int) -> Candidates:
        one, trie = self.sequences[sequence], _Trie(depths, nodes)
        for following in reversed(one.pool.get(one.tokens[-1], ())):
            node = -1
            for place, token in enumerate(following):
                node = trie.child(node, token, LATER if place else FIRST)
        chain = -1
        for column in range(self.window):
            chain = node = trie.child(chain, one.rows[0][column], GUESSED)
            for row in one.rows[1:]:
                node = trie.child(node, row[column], GUESSED)
        return Candidates(trie.tokens, trie.parents, trie.scores)

    def verified(self, sequence: int, tokens: Sequence[int], parents: Sequence[int], picks: Sequence[int]) -> None:
        """Receive a sequence's verified tree, the root first, and the pick at every node, after `extend` by the tokens written."""
        one = self.sequences[sequence]
        children = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
        found: list[int] = []
        chain: int | None = 0
        for column in range(self.window):
            chain = node = None if chain is None else children.get((chain, one.rows[0][column]))
            for row in one.rows[1:]:
                node = None if node is None else children.get((node, row[column]))
            found.append(one.rows[-1][column] if node is None else picks[node])
            if node is not None and len(one.rows) == self.ngram - 1:
                _pool(one.pool, (*(row[column] for row in one.rows), picks[node]))
        one.rows = [*one.rows, found][-(self.ngram - 1) :] if self.ngram > 2 else [found]
        self._shift(one, one.written - (len(one.rows) == self.ngram - 1))

    def _shift(self, one: Trajectory, columns: int) -> None:
        """Move the window by that many columns to the right; new columns are guessed."""
        for row in one.rows if columns > 0 else []:
            row[:] = row[columns:] + [one.guess() for _ in range(min(columns, self.window))]


class _Trie:
    """Candidates without two nodes of the same parent and token, within a depth and a number of nodes."""

    def __init__(self, depths: int, nodes: int) -> None:
        self.depths, self.nodes = depths, nodes
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []
        self._known: dict[tuple[int, int], int] = {}
        self._levels = {-1: 0}

    def child(self, parent: int, token: int, score: float) -> int:
        """The node of that token below a parent; -2, which has no children, where there is no room."""
        if parent == -2 or (parent, token) in self._known:
            return self._known.get((parent, token), -2)
        if self._levels[parent] == self.depths or len(self.tokens) == self.nodes:
            return -2
        node = self._known[parent, token] = len(self.tokens)
        self._levels[node] = self._levels[parent] + 1
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        return node


def _pool(pool: OrderedDict[int, deque[tuple[int, ...]]], ngram: tuple[int, ...]) -> None:
    """Add an n-gram, as the newest of its first token."""
    first, following = ngram[0], ngram[1:]
    known = pool.setdefault(first, deque(maxlen=POOLED))
    pool.move_to_end(first)
    if following in known:
        known.remove(following)
    known.append(following)
    if len(pool) > FIRST_TOKENS:
        pool.popitem(last=False)
