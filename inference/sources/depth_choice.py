"""Chooses how many depths of an adaptive tree a drafter drafts, by what depths brought and took in earlier steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from headstart.inference.engine.cost_model import interpolated
from headstart.inference.engine.sizes import octave
from headstart.inference.sources.draft import Draft
from headstart.inference.sources.source import EMA_WEIGHT, Learned

RETRY_BONUS = 0.002
"""Increase of a depth's acceptance rate towards 1 each time it is not drafted, so that it is retried after some hundred passes."""


class DepthChoice:
    """The numbers of depths to choose from: up to ``depth``, the drafter's, and few further ones up to ``deepest``.

    Each is captured apart. ``few``: that takes long, so they are powers of two, and none is beyond ``depth``.
    """

    def __init__(self, depth: int, deepest: int, few: bool) -> None:
        counts = {1 << power for power in range(depth.bit_length())} | {depth}
        self.counts = sorted(counts if few else {*range(1, depth + 1), (depth + deepest + 1) // 2, deepest})

    def best(self, draft: Draft, learned: Learned, limit: int, seconds: Callable[[int], float]) -> int:
        """The number of depths, at most ``limit``, that makes decoding fastest; 0 only if other sources have drafted what will be accepted.

        They are worth the tokens expected from them, at the recent rate, minus the time to draft them (``seconds``, 0 if not known) and to
        verify one node of each. Tokens are expected where the parents are reached, by the path probabilities of recent steps, and no other
        draft is accepted.
        """
        counts = [count for count in self.counts if count <= limit]
        if not draft.rate or not counts:
            return max(counts, default=0)
        worth = _worth(draft, learned, self._next(limit), seconds)
        depths = max([0] * (min(draft.missed(limit)) < 1) + counts, key=worth.__getitem__)
        if not depths:
            return 0
        known, further = len(learned.masses), self._next(depths)
        if depths < min(known, limit):   # those that are not drafted are to be tried again
            for k in range(depths, min(further, len(learned.acceptance))):
                learned.acceptance[k] += RETRY_BONUS * (1 - learned.acceptance[k])
        elif depths >= known and learned.stats[octave(len(draft.pools))].proved:   # all that was ever drafted pays
            learned.limit = further if depths == known and worth[further] > worth[depths] else depths
        return depths

    def _next(self, depths: int) -> int:
        """The next larger number to choose from; the same if there is none."""
        return next((count for count in self.counts if count > depths), depths)


def note_masses(learned: Learned, draft: Draft, levels: Sequence[list[list[int]]]) -> None:
    """Record the summed path probabilities of each drafted level's nodes, by row, as a mean over rows.

    The mean of a depth that is drafted for the first time starts at what was expected, since a single draft says little.
    """
    probs, masses = [pool.path_probs() for pool in draft.pools], learned.masses
    for depth, level in enumerate(levels):
        sums = [min(sum(of[node] for node in {*own} if node >= 0), 1.0) for of, own in zip(probs, level, strict=True)]
        mass = sum(sums) / len(sums)
        if depth == len(masses):
            reached, acceptance = _expected(learned, depth + 1)
            masses.append(reached[depth] * acceptance[depth])
        masses[depth] += EMA_WEIGHT * (mass - masses[depth])


def _worth(draft: Draft, learned: Learned, limit: int, seconds: Callable[[int], float]) -> list[float]:
    """Seconds that drafting each number of depths, 0 to ``limit``, is expected to save."""
    rows, (reached, acceptance), missed = len(draft.pools), _expected(learned, limit), draft.missed(limit)
    gains = [rows * reached[k] * acceptance[k] * missed[k] / draft.rate - draft.node_seconds for k in range(limit)]
    known = ((k, seconds(k)) for k in range(1, limit + 1))
    curve = [(0, 0.0), *((k, time) for k, time in known if time)]
    return [gain - interpolated(curve, k) for k, gain in enumerate(accumulate(gains, initial=0.0))]


def _expected(learned: Learned, depths: int) -> tuple[list[float], list[float]]:
    """For each depth, the probability that its parents are reached, and the acceptance rate given that they are.

    Depths that were never drafted are taken to be accepted as the last one that was.
    """
    acceptance = [*learned.acceptance, *learned.acceptance[-1:] * (depths - len(learned.acceptance))]
    reached = [1.0, *learned.masses]
    while len(reached) < depths:
        reached.append(reached[-1] * acceptance[len(reached) - 1])
    return reached, acceptance
