"""Texts that are known beforehand, whatever a model thinks of them, and random candidate trees in which parts of them are found.

The token after a text is a function of its last token and its length, so two runs write the same text, and their logits can be compared
token by token, however their roundings differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from torch import LongTensor, Tensor
from transformers import LogitsProcessor

from headstart.heads.backbone.features import Features
from headstart.inference.adaptive.latency import Costs
from headstart.inference.engine.known_processors import stateless
from headstart.inference.engine.tree import CandidateTree, TreeShape, root_only
from headstart.inference.sources.source import Accepted, Draft, Source
from headstart.inference.speculation.speculation import Speculation

SIZES = (1, 1, 3, 8, 13, 27, 50)
"""Tree sizes to draw from."""
PLAIN = 0.3
"""Share of plain steps, without drafts."""
DECOYS, KNOWN, FURTHER = 5, 6, 60
"""Most nodes of a pool: random ones before the known ones, so that these have to be moved when accepted, known ones, random ones after."""


def next_token(last: int, length: int, vocab: int) -> int:
    """The token that follows a text of that length with that last token."""
    return (last * 7919 + length * 104729 + 12345) % vocab


@stateless
class Known(LogitsProcessor):
    """Scores by which every text goes on as `next_token` says."""

    def __call__(self, input_ids: LongTensor, scores: Tensor) -> Tensor:
        length, vocab = input_ids.shape[1], scores.shape[1]
        following = [next_token(last, length, vocab) for last in input_ids[:, -1].tolist()]
        return scores.new_zeros(scores.shape).scatter(1, input_ids.new_tensor(following)[:, None], 1.0)


class KnownText(Source):
    """Drafts a part of the known text among random nodes. ``ends``: the length at which each sequence ends."""

    def __init__(self, ends: Sequence[int], vocab: int, chance: random.Random) -> None:
        super().__init__("known text", KNOWN)
        self.ends, self.vocab, self.chance = ends, vocab, chance

    def join(self, sequences: list[int], tokens: list[list[int]], features: Features) -> None:
        """It needs no state."""

    def extend(self, accepted: Accepted) -> None:
        """It needs no state."""

    def draft(self, draft: Draft, depths: int) -> None:
        chance = self.chance
        for pool, remaining, number in zip(draft.pools, draft.remaining, draft.sequences, strict=True):
            if not remaining:
                continue
            length, node = self.ends[number] - remaining, 0
            for _ in range(chance.randrange(DECOYS)):
                pool.add(self, 0, chance.randrange(self.vocab), math.log(0.5), 0.5)
            for depth in range(min(chance.randrange(KNOWN + 1), remaining)):
                node = pool.add(self, node, next_token(pool.tokens[node], length + depth, self.vocab), math.log(0.9), 0.9)
            for _ in range(FURTHER):
                parent = chance.randrange(len(pool.tokens))
                pool.add(self, parent if pool.levels[parent] < remaining else 0, chance.randrange(self.vocab), math.log(0.2), 0.2)


class RandomTrees(Speculation):
    """Trees of random sizes, with plain steps among them; nothing is learned. ``plain``: nothing but plain steps."""

    def __init__(self, sources: Sequence[Source], chance: random.Random, plain: bool = False) -> None:
        super().__init__(sources)
        self.chance, self.plain = chance, plain
        self.costs = Costs()
        self.drafts: dict[tuple[int, int], dict[int, float]] = {}
        """By sequence and the tokens it may still write: the first tokens that drafters drafted, with their scores."""

    def active(self, shape: TreeShape | None, rows: int) -> list[Source]:
        return [] if self.plain or self.chance.random() < PLAIN else self.sources

    def depths(self, draft: Draft, source: Source) -> int:
        return min(source.depth, max([0, *draft.remaining]))

    def choose(self, draft: Draft) -> CandidateTree:
        for pool, remaining, number in zip(draft.pools, draft.remaining, draft.sequences, strict=True):
            first = [one for one in pool.proposals if pool.levels[one.node] == 1 and not isinstance(one.source, KnownText)]
            self.drafts[number, remaining] = {pool.tokens[one.node]: one.score for one in first}
        nodes = self.chance.choice(SIZES)
        draft.kept = [pool.best(nodes) for pool in draft.pools]
        return CandidateTree.of(draft.pools, draft.kept) if nodes > 1 else root_only([pool.tokens[0] for pool in draft.pools])

    def learn(self, draft: Draft, tree: CandidateTree, paths: list[list[int]], picks: list[list[int]]) -> None:
        """Its trees say nothing of others."""

    def time(self, draft: Draft, tree: CandidateTree, paths: list[list[int]], seconds: float) -> None:
        """Its passes are recorded or uncaptured."""
