"""Best-first expansion: a proposer's trie grows by the likeliest node until it is large enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TypeVar

from headstart.inference.sources.proposer import Candidates

MIN_PATH_PROB = 0.005
"""Nodes of a smaller path probability are not expanded: no tree would include them."""

State = TypeVar("State")
"""A proposer's own state after a token, such as the state of an automaton."""
Expand = Callable[[State, float], Iterable[tuple[int, float, State]]]
"""Possible next tokens, each once, with probability (in (0, 1)) and state. Less likely ones than the number may be left out."""


def grow(root: State, expand: Expand[State], depths: int, nodes: int) -> Candidates:
    """The ``nodes`` nodes of largest path probability, of depths 0 to ``depths - 1``."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # Path probability (negative, since a heap's first is its smallest), parent, token, probability given the parent, level, state.
    # No two have the same parent and token, so states are never compared.
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
