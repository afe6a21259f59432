"""How proposers without training grow their candidates: always the likeliest node next, until there are enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TypeVar

from headstart.inference.sources.proposer import Candidates

LEAST = 0.005
"""Nodes less likely to be reached need not be looked for: they would not be worth their place in any tree."""

Place = TypeVar("Place")
"""Where a proposer stands after a token, whatever that is to it."""
Expand = Callable[[Place, float], Iterable[tuple[int, float, Place]]]
"""What may follow a place: tokens, each once, with chance (in (0, 1)) and place. It may leave out what is less likely than the number."""


def grow(root: Place, expand: Expand[Place], depth: int, nodes: int) -> Candidates:
    """The ``nodes`` nodes of largest chance to be reached (the product along the path), none deeper than ``depth``."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # Chance to be reached (negative, as a heap's first is its least), parent, token, chance given the parent, depth, place.
    # No two have the same parent and token, so places are never compared.
    waiting: list[tuple[float, int, int, float, int, Place]] = []
    place, node, reach, below = root, -1, 1.0, 0
    while True:
        if below < depth:
            for token, chance, after in expand(place, LEAST / reach):
                heappush(waiting, (-reach * chance, node, token, chance, below + 1, after))
        if not waiting or len(tokens) >= nodes:
            return Candidates(tokens, parents, scores)
        less, parent, token, chance, below, place = heappop(waiting)
        node, reach = len(tokens), -less
        tokens.append(token)
        parents.append(parent)
        scores.append(math.log(chance))
