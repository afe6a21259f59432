"""What is drafted for the beams of some rows, ranked by what beam search ranks by, and which of it a pass reads.

The sources are those of greedy decoding: drafters keep a state for each beam, which follows it when beams part. Of the proposers those
take part that watch what the backbone says (they know breadth); one that continues a text as it went before knows one continuation.

Shape suffixes: R beams of all rows, P positions along a path.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headstart.heads.base import Features, join_features
from headstart.inference.beam_breadth import DEPTHS, Breadth, Plan
from headstart.inference.beam_forest import padded
from headstart.inference.beam_search import Beam
from headstart.inference.growth import Ranking
from headstart.inference.speculation import WIDTH, Draft, Speculation
from headstart.inference.tree import Pool, TreeShape

EVERY = 4
"""Passes between two choices of what is read."""
WAITING = 8
"""So many passes' features may wait to be taken in."""

Path = tuple[int, tuple[int, ...]]
"""A beam, and the tokens drafted behind its last one."""


@dataclass(frozen=True)
class Drafts:
    """Of one row: the drafts of each depth, best first, and which of them are read, parents before children."""

    ranks: list[dict[Path, int]]
    chosen: list[Path]

    def need(self, depth: int, paths: list[Path]) -> int | None:
        """How many drafts of that depth hold all these; None: some were not drafted."""
        ranks = [self.ranks[depth].get(path) for path in paths]
        return None if None in ranks else 1 + max(rank for rank in ranks if rank is not None)


class Drafting:
    """One call's drafts. Rows of states are beams: those of the first row, those of the second, ..."""

    def __init__(self, speculation: Speculation, breadth: Breadth, shape: TreeShape | None) -> None:
        self.speculation, self.breadth, self.shape = speculation, breadth, shape
        drafters = speculation.drafters
        self.watching = [i + len(drafters) for i, one in enumerate(speculation.proposers) if one.watches]
        self.deepest = max([0, *(drafter.depth for drafter in drafters), *([DEPTHS] if self.watching else [])])
        self.states: list[Any] = [None for _ in drafters]
        self.news: list[list[Features]] = [[] for _ in drafters]
        self.passes = 0
        self.plan = Plan((), 0.0)

    def start(self, features: Features) -> None:
        """Take in the prompts, one row each; the beams are put in by `follow`."""
        self.states = [growth.take_in(features, None, 0) for growth in self.speculation.growths]
        self.news = [[] for _ in self.states]

    def follow(self, origins: list[int], features: Features | None = None) -> None:
        """The beams are now those that continue these, with the features of what each has gone on by."""
        for source, drafter in enumerate(self.speculation.drafters):
            origins_R = torch.tensor(origins, device=drafter.backbone[0].device)
            self.states[source] = drafter.select(self.states[source], origins_R)
            news = [one.rows(origins_R) for one in self.news[source]] + ([features] if features is not None else [])
            self.news[source] = news if len(news) < WAITING else [join_features(news)]

    def draft(self, rows: list[list[Beam]], prompts: list[list[int]], room: list[int]) -> list[Drafts]:
        """For each row the drafts of its beams. ``room``: how deep drafts of a row may lie."""
        start = time.perf_counter()
        self._plan(len(rows), max(room))
        widths = self.plan.widths
        if not widths:
            return [Drafts([], []) for _ in rows]
        beams = self.breadth.beams
        pools = [Pool(beam.tokens[-1]) for row in rows for beam in row]
        draft = Draft(pools, [min(deep, len(widths)) for deep in room for _ in range(beams)])
        self._propose(draft, [prompt + beam.tokens for prompt, row in zip(prompts, rows, strict=True) for beam in row])
        width = self.shape.width if self.shape is not None else WIDTH
        longest = max(len(prompt) + len(row[0].tokens) for prompt, row in zip(prompts, rows, strict=True))
        for source in range(len(self.states)):
            self._take_in(source, longest + (self.speculation.drafters[source].depth + 1) * (width + 1))
            self.states[source] = self.speculation.grow(
                draft, source, self.states[source], Ranking(), TreeShape(width=width, depth=len(widths))
            )
        drafts = [self._rank(row, pools[b * beams : (b + 1) * beams]) for b, row in enumerate(rows)]
        if self.speculation.steady:
            self.speculation.costs.add("beams' draft", len(rows), (time.perf_counter() - start) / len(widths))
        return drafts

    def learn(self, drafts: Drafts, depth: int, paths: list[Path]) -> None:
        """The beams at that depth turned out to be these."""
        if depth < len(drafts.ranks):
            self.breadth.learn(depth, drafts.need(depth, paths))

    def see(self, tokens: list[int], likeliest: np.ndarray, logprobs: np.ndarray) -> None:
        """What the backbone has said of nodes: for each its token, and the likeliest next ones ``[N, M]``."""
        for source in self.watching:
            proposer = self.speculation.proposers[source - len(self.states)]
            proposer.see(tokens, likeliest[:, : proposer.watches].tolist(), logprobs[:, : proposer.watches].tolist())

    @property
    def watches(self) -> int:
        """How many of the likeliest next tokens `see` wants."""
        return max([0, *(self.speculation.proposers[source - len(self.states)].watches for source in self.watching)])

    def _plan(self, rows: int, room: int) -> None:
        """How many drafts of each depth are read: those that make a pass fastest, or as many as the shape allows."""
        self.breadth.fade()
        self.passes += 1
        if self.passes % EVERY != 1 and len(self.plan.widths) <= room:
            return
        if self.shape is not None:
            units = min((self.shape.nodes - self.breadth.beams) // self.breadth.unit, len(self.breadth.widths) - 1)
            deepest = min(self.shape.depth or self.deepest, self.deepest, room)
            self.plan = self.breadth.plans(deepest)[units] if units > 0 else Plan((), 0.0)
        else:
            plans = {plan.widths: plan for plan in self.breadth.plans(min(self.deepest, room))}
            self.plan = max(plans.values(), key=lambda plan: (1 + plan.steps) / self._seconds(rows, plan))

    def _seconds(self, rows: int, plan: Plan) -> float:
        costs = self.speculation.costs
        nodes = padded(self.breadth.beams + sum(plan.widths))
        drafting = len(plan.widths) * costs.part("beams' draft", rows)
        return costs.of_pass(rows, nodes) + drafting + costs.part("beams' host", rows)

    def _propose(self, draft: Draft, texts: list[list[int]]) -> None:
        for beam, text in enumerate(texts):
            for source in self.watching:
                self.speculation.proposers[source - len(self.states)].open(beam, text)
        self.speculation.propose(draft, self.watching, range(len(texts)))

    def _take_in(self, source: int, room: int) -> None:
        if self.news[source]:
            growth = self.speculation.growths[source]
            self.states[source] = growth.take_in(join_features(self.news[source]), self.states[source], room)
            self.news[source] = []

    def _rank(self, row: list[Beam], pools: list[Pool]) -> Drafts:
        """All drafts of a row by depth and score, and of those as many as are planned whose parents are read too."""
        levels: list[list[tuple[float, Path]]] = [[] for _ in self.plan.widths]
        for place, (beam, pool) in enumerate(zip(row, pools, strict=True)):
            scores = [0.0] + [-np.inf] * (len(pool.tokens) - 1)
            for guess in pool.guesses:
                scores[guess.node] = max(scores[guess.node], guess.score)
            paths: list[tuple[int, ...]] = [()]
            totals = [float(beam.score)]
            for node in range(1, len(pool.tokens)):
                parent = pool.parents[node]
                paths.append((*paths[parent], pool.tokens[node]))
                totals.append(totals[parent] + scores[node])
                levels[pool.depths[node] - 1].append((totals[node], (place, paths[node])))
        ranks: list[dict[Path, int]] = []
        read: set[Path] = {(place, ()) for place in range(len(row))}
        chosen: list[Path] = []
        for level, width in zip(levels, self.plan.widths, strict=True):
            level.sort(key=lambda one: -one[0])
            ranks.append({path: rank for rank, (_, path) in enumerate(level)})
            able = [(place, path) for _, (place, path) in level if (place, path[:-1]) in read]
            read.update(able[:width])
            chosen += able[:width]
        return Drafts(ranks, chosen)
