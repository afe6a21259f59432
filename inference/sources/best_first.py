"""Best-first expansion: the most likely node is added to a proposer's trie until the trie is large enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TypeVar

from headstart.inference.sources.proposer import Candidates

MIN_PATH_PROB = 0.005
"""Minimum path probability of a node: no tree would include less likely ones."""

State = TypeVar("State")
"""A proposer's state after a token, such as the state of an automaton."""
Expand = Callable[[State, float], Iterable[tuple[int, float, State]]]
"""(state, minimum probability) -> distinct next tokens, each with its probability in (0, 1) and state; less likely ones may be omitted."""


def grow(root: State, expand: Expand[State], depths: int, nodes: int) -> Candidates:
    """The ``nodes`` nodes of largest path probability, at depths 0 to ``depths - 1``."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # Path probability (negated: the heap is a min-heap), parent, token, probability given the parent, level, state.
    # No two entries have the same parent and token, so states are never compared.
    waiting: list[tuple[float, int, int, float, int, State]] = []
    state, node, path_prob, level = root, -1, 1.0, 0
    while True:
        if level < depths:
            for token, prob, after in expand(state, MIN_PATH_PROB / path_prob):
                heappush(waiting, (-path_prob * prob, node, token, prob, level + 1, after))
        if not waiting or len(tokens) >= nodes:
            return Candidates(tokens, parents, scores)
        negative, parent, token, prob, level, state = heappop(waiting)
        node, path_prob = len(tokens), -negative
        tokens.append(token)
        parents.append(parent)
        scores.append(math.log(prob))
