"""What is drafted for the beams of some rows, ranked by what beam search ranks by, and which of it a pass reads.

The sources are those of greedy decoding: drafters keep a state for each beam, which follows it when beams part. Those that draft on the
backbone's own cache sit out, since it has no row for each beam. Of the proposers those take part that prepare_draft what the backbone says
(they know breadth); one that continues a text as it went before knows one continuation. Where the backbone has read a beam's last
token already, what it said stands in for drafts.

Shape suffixes: B rows, R beams of all rows, W drafts of a beam and depth, N nodes, M likeliest next tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads.backbone.features import Features, join_features
from headstart.heads.base import Drafter
from headstart.inference.beam.breadth import DEPTHS, Breadth, Plan
from headstart.inference.beam.search import Beam
from headstart.inference.beam.trie import TopK, padded
from headstart.inference.engine.tree import TreeShape
from headstart.inference.sources.expansion import DraftScoring, Level, root_level
from headstart.inference.speculation.speculation import OFFERS, WIDTH, Speculation

EVERY = 8
"""Passes between two choices of what is read, where it is chosen by time."""
WAITING = 8
"""So many passes' features may wait to be taken in."""
NEVER = -1e8
"""Totals below it are no drafts."""

Path = tuple[int, tuple[int, ...]]
"""A beam, and the tokens drafted behind its last one."""


@dataclass(frozen=True)
class Wanted:
    """A row that wants drafts."""

    beams: list[Beam]
    prompt: list[int]
    room: int
    """How deep drafts may lie."""
    known: list[dict[tuple[int, ...], TopK]]
    """For each beam, what was said at its last token and behind it, as far as that was read."""

    @property
    def fresh(self) -> bool:
        """Whether nothing is known."""
        return not any(self.known)


@dataclass(frozen=True)
class Drafts:
    """Of one row: the drafts of each depth, best first, and which of them are read, parents before children."""

    ranks: list[dict[Path, int]]
    chosen: list[Path]
    breadth: Breadth | None = None
    """Where to note what came of them."""

    def learn(self, depth: int, paths: list[Path]) -> None:
        """The beams at that depth turned out to be these."""
        if self.breadth is not None and depth < len(self.ranks):
            ranks = [self.ranks[depth].get(path) for path in paths]
            self.breadth.learn(depth, None if None in ranks else 1 + max(rank for rank in ranks if rank is not None))


class Drafting:
    """One call's drafts. Rows of states are beams: those of the first row, those of the second, ...

    ``breadths``: what was learned of rows of which nothing is known beforehand, and of those of which something is.
    """

    def __init__(self, speculation: Speculation, breadths: tuple[Breadth, Breadth], shape: TreeShape | None) -> None:
        self.speculation, self.breadths, self.shape = speculation, breadths, shape
        self.beams = breadths[0].beams
        self.width = shape.width if shape is not None else max(WIDTH, 2 * self.beams)
        self.growths = [growth for growth in speculation.growths if type(growth.drafter).prepare_draft is Drafter.prepare_draft]
        self.watching = [one for one in speculation.proposers if one.watches]
        self.deepest = max([0, *(growth.drafter.depth for growth in self.growths), *([DEPTHS] if self.watching else [])])
        self.states: list[Any] = [None for _ in self.growths]
        self.origins: list[int] = []
        """Of each beam, the row of the states that it continues."""
        self.news: list[tuple[Features, list[int]]] = []
        """What the states have not taken in, and of each beam the row of those features that is its."""
        self.passes = 0
        self.plans = (Plan((), 0.0), Plan((), 0.0))

    def start(self, features: Features) -> None:
        """Take in the prompts, one row each; the beams are put in by `follow`."""
        self.states = [growth.extend_state(features, None, 0) for growth in self.growths]
        self.origins, self.news = list(range(len(features.tokens_BT))), []

    def follow(self, origins: list[int], features: Features | None = None) -> None:
        """The beams are now those that continue these, with the features of what each has gone on by."""
        self.origins = [self.origins[origin] for origin in origins]
        self.news = [(one, [rows[origin] for origin in origins]) for one, rows in self.news]
        if features is not None:
            self.news.append((features, list(range(len(origins)))))
        if len(self.news) > WAITING:
            self.news = [(self._gathered(), list(range(len(origins))))]

    def draft(self, rows: list[Wanted]) -> list[Drafts]:
        """For each row the drafts of its beams."""
        start, disturbed = time.perf_counter(), self.speculation.disturbed
        self._plan(rows)
        plans = [self.plans[not row.fresh] for row in rows]
        deepest = max(len(plan.widths) for plan in plans)
        if not deepest:
            return [Drafts([], []) for _ in rows]
        scores: list[dict[tuple[int, ...], float]] = [{} for row in rows for _ in row.beams]
        self._propose(rows, deepest, scores)
        self._take_in(max(len(row.prompt) + len(row.beams[0].tokens) for row in rows))
        for source in range(len(self.growths)):
            self._grow(source, rows, deepest, scores)
        K = self.beams
        drafts = [self._rank(row, scores[b * K : (b + 1) * K], plans[b]) for b, row in enumerate(rows)]
        if self.speculation.disturbed == disturbed:
            self.speculation.costs.add("beams' draft", len(rows), (time.perf_counter() - start) / deepest)
        return drafts

    def see(self, tokens: list[int], likeliest: np.ndarray, logprobs: np.ndarray) -> None:
        """What the backbone has said of nodes: for each its token, and the likeliest next ones ``[N, M]``."""
        for proposer in self.watching:
            proposer.see(tokens, likeliest[:, : proposer.watches].tolist(), logprobs[:, : proposer.watches].tolist())

    @property
    def watches(self) -> int:
        """How many of the likeliest next tokens `see` wants."""
        return max([0, *(proposer.watches for proposer in self.watching)])

    # How much.

    def _plan(self, rows: list[Wanted]) -> None:
        """How many drafts of each depth are read: those that make a pass fastest, or as many as the shape allows."""
        room = max(row.room for row in rows)
        for breadth in self.breadths:
            breadth.fade()
        self.passes += 1
        if self.shape is not None or self.passes % EVERY == 1 or max(len(plan.widths) for plan in self.plans) > room:
            self.plans = (self._best_plan(self.breadths[0], len(rows), room), self._best_plan(self.breadths[1], len(rows), room))

    def _best_plan(self, breadth: Breadth, rows: int, room: int) -> Plan:
        if self.shape is not None:
            units = min((self.shape.nodes - self.beams) // breadth.unit, len(breadth.widths) - 1)
            deepest = min(self.shape.depth or self.deepest, self.deepest, room)
            return breadth.plans(deepest)[units] if units > 0 else Plan((), 0.0)
        costs = self.speculation.costs
        plans = {padded(self.beams + sum(plan.widths)): plan for plan in breadth.plans(min(self.deepest, room))}   # of a size the best
        drafting, host = costs.part("beams' draft", rows), costs.part("beams' host", rows)
        seconds = {nodes: costs.of_pass(rows, nodes) + len(plan.widths) * drafting + host for nodes, plan in plans.items()}
        return max(plans.items(), key=lambda one: (1 + one[1].steps) / seconds[one[0]])[1]

    # What.

    def _propose(self, rows: list[Wanted], deepest: int, scores: list[dict[tuple[int, ...], float]]) -> None:
        texts = [row.prompt + beam.tokens for row in rows for beam in row.beams] if self.watching else []
        for proposer in self.watching:
            for place, (text, known) in enumerate(zip(texts, scores, strict=True)):
                proposer.open(place, text)
                offered = proposer.propose(place, deepest, OFFERS)
                paths: list[tuple[int, ...]] = []
                for token, parent, score in zip(offered.tokens, offered.parents, offered.scores, strict=True):
                    paths.append((*(paths[parent] if parent >= 0 else ()), token))
                    known[paths[-1]] = max(score, known.get(paths[-1], score))

    def _gathered(self) -> Features:
        return join_features([one.rows(torch.tensor(rows, device=one.tokens_BT.device)) for one, rows in self.news])

    def _take_in(self, longest: int) -> None:
        """Let the states be those of the beams. ``longest``: tokens of the longest text."""
        news = self._gathered() if self.news else None
        for source, growth in enumerate(self.growths):
            drafter = growth.drafter
            state = drafter.select(self.states[source], torch.tensor(self.origins, device=drafter.backbone.device))
            room = longest + (drafter.depth + 1) * (self.width + 1)
            self.states[source] = drafter.reserve(state, room) if news is None else growth.extend_state(news, state, room)
        self.origins, self.news = list(range(len(self.origins))), []

    def _grow(self, source: int, rows: list[Wanted], deepest: int, scores: list[dict[tuple[int, ...], float]]) -> None:
        """Let a drafter draft depth by depth."""
        growth, drafter = self.growths[source], self.growths[source].drafter
        level = root_level([beam.tokens[-1] for row in rows for beam in row.beams], drafter.backbone.device)
        paths: list[list[tuple[int, ...]]] = [[()] for _ in scores]
        for depth in range(min(deepest, drafter.depth)):
            level, self.states[source] = growth.level(depth, self.states[source], level, self.width, DraftScoring())
            if not depth:
                level = _corrected(level, [known.get(()) for row in rows for known in row.known])
            drafted = zip(level.tokens_BW.tolist(), level.parents_BW.tolist(), level.scores_BW.tolist(), strict=True)
            for place, (own, (tokens, parents, values)) in enumerate(zip(scores, drafted, strict=True)):
                paths[place] = [(*paths[place][parent], token) for parent, token in zip(parents, tokens, strict=True)]
                for path, value in zip(paths[place], values, strict=True):
                    own[path] = max(value, own.get(path, value))

    def _rank(self, row: Wanted, scores: list[dict[tuple[int, ...], float]], plan: Plan) -> Drafts:
        """All drafts of a row by depth and total score, and of those as many as are planned whose parents are read too."""
        levels: list[list[tuple[float, Path]]] = [[] for _ in plan.widths[: row.room]]
        for place, (beam, known, own) in enumerate(zip(row.beams, row.known, scores, strict=True)):
            own = {path: score for path, score in own.items() if path[:-1] not in known}
            for above, said in known.items():
                own |= {(*above, token): value for token, value in zip(said.tokens_M.tolist(), said.logprobs_M.tolist(), strict=True)}
            totals: dict[tuple[int, ...], float] = {(): float(beam.score)}
            for path in sorted(own, key=len):
                total = totals.get(path[:-1], NEVER) + own[path]
                if len(path) <= len(levels) and total > NEVER:
                    totals[path] = total
                    levels[len(path) - 1].append((total, (place, path)))
        ranks: list[dict[Path, int]] = []
        read: set[Path] = {(place, ()) for place in range(len(row.beams))}
        chosen: list[Path] = []
        for level, width in zip(levels, plan.widths, strict=False):
            level.sort(key=lambda one: -one[0])
            ranks.append({path: rank for rank, (_, path) in enumerate(level)})
            able = [(place, path) for _, (place, path) in level if (place, path[:-1]) in read][:width]
            read.update(able)
            chosen += able
        return Drafts(ranks, chosen, self.breadths[not row.fresh])


def _corrected(level: Level, said: list[TopK | None]) -> Level:
    """The first drafts of beams with what the backbone has said in their place, where it has."""
    known = [place for place, one in enumerate(said) if one is not None]
    if not known:
        return level
    W, device = level.tokens_BW.shape[1], level.tokens_BW.device

    def instead(drafted_BW: Tensor, exact: list[np.ndarray], rest: float) -> Tensor:
        rows = np.full((len(exact), W), rest)
        for row, one_M in zip(rows, exact, strict=True):
            row[: len(one_M)] = one_M[:W]
        return drafted_BW.index_copy(0, torch.tensor(known, device=device), torch.from_numpy(rows).to(drafted_BW))

    tokens = [one.tokens_M for one in said if one is not None]
    logprobs = [one.logprobs_M for one in said if one is not None]
    scores_BW, totals_BW = instead(level.scores_BW, logprobs, 10 * NEVER), instead(level.totals_BW, logprobs, 10 * NEVER)
    return replace(level, tokens_BW=instead(level.tokens_BW, tokens, 0), scores_BW=scores_BW, totals_BW=totals_BW)
