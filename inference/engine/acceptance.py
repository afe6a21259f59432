"""What a source's drafts are worth: acceptance by score and depth over all texts, and how far the present text is off.

A score is the log of a source's own estimate. Sources are over- or under-confident to different degrees at each depth, so a `Table` for
each depth maps scores to probabilities; they are kept in the checkpoint. A text's `Offset` is added to the log-odds of every draft in it:
texts differ more than depths do, so one number, learned from all of a text's drafts, is right after a few steps (a logistic model with a
random effect of the text). `Acceptance.levels` are the acceptance rates by depth and rank of recent drafts, from which the next draft's
are expected before it is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, zip_longest
from typing import Any

from headstart.inference.engine.tree import MAX_PROB, Pool

LOW_ODDS, HIGH_ODDS, BINS = -6.0, 6.0, 13
"""Range and number of a table's entries, in log-odds of the estimate."""
PRIOR = 8.0
"""Weight of the estimate itself, in observations."""
HORIZON = 400.0
"""Approximate number of observations that an entry remembers."""
MAX_TRIALS = 1e9
"""Trials in a file are fewer."""
LAST_TABLE = 7
"""Depths from this one on share a table."""
FIRST = 0.6
"""The acceptance rate of a depth before any draft of it."""
TEXT_SPREAD = 1.2
"""Standard deviation of a text's log-odds about those of the texts before; measured between tasks (LOG.md)."""
MEMORY = 64.0
"""Steps after which what was learned of a text counts for 1/e: it may turn to something else."""
FOLLOW = 0.04
"""Weight of a step's offset in the mean of the texts, from which the next text starts."""
DRAFTS = 0.1
"""Weight of the last draft in the acceptance rates by depth and rank."""
LEAST_INFORMATION = 0.1
"""Precision that a draft adds at least, however sure its outcome was."""
MOST_OFFSET = 6.0
"""Bound of an offset."""
STORED_DRAFTS = 3
"""Drafts that a stored mean counts as: here beams may be of another width."""
LEAST_MASS = 0.02
"""A level whose parents are reached with less says nothing of its acceptance rate."""


def shifted(prob: float, offset: float) -> float:
    """The probability whose log-odds are larger by the offset."""
    return 1 / (1 + (1 / max(prob, 1e-9) - 1) * math.exp(-offset)) if offset else prob


ESTIMATES = [shifted(0.5, LOW_ODDS + i * (HIGH_ODDS - LOW_ODDS) / (BINS - 1)) for i in range(BINS)]
"""The probabilities that entries stand for."""


class Table:
    """How often drafts were picked, by bins of the score's log-odds: the identity at first, interpolated, and slowly forgotten."""

    def __init__(self, hits: list[float] | None = None, trials: list[float] | None = None) -> None:
        self.hits, self.trials = hits or [0.0] * BINS, trials or [0.0] * BINS

    def prob(self, score: float) -> float:
        """The acceptance probability of nodes with this score."""
        return sum(weight * self._entry(i) for i, weight in _bins(score))

    def _entry(self, i: int) -> float:
        return (self.hits[i] + PRIOR * ESTIMATES[i]) / (self.trials[i] + PRIOR)

    def learn(self, score: float, hit: bool) -> None:
        """Record that a node with this score was verified."""
        for i, weight in _bins(score):
            keep = 1 - weight / HORIZON
            self.hits[i] = keep * self.hits[i] + weight * hit
            self.trials[i] = keep * self.trials[i] + weight

    @staticmethod
    def from_json(stored: dict[str, Any]) -> Table:
        """Raises ValueError, TypeError or KeyError unless it is what `Acceptance.to_json` wrote."""
        hits, trials = ([float(value) for value in stored[name]] for name in ("hits", "trials"))
        possible = all(0 <= hit <= trial + 0.01 < MAX_TRIALS for hit, trial in zip(hits, trials, strict=False))
        if not len(hits) == len(trials) == BINS or not possible:
            raise ValueError(f"a table has {BINS} hits and trials, no more hits than trials; got {str(stored)[:60]}")
        return Table(hits, trials)


@lru_cache(1 << 10)  # of a step's drafts, each is asked for several times
def _bins(score: float) -> tuple[tuple[int, float], tuple[int, float]]:
    """The entries below and above a score, and their weights."""
    odds = score - math.log(-math.expm1(min(score, -1e-6))) if score > -30 else score
    place = (min(max(odds, LOW_ODDS), HIGH_ODDS) - LOW_ODDS) / (HIGH_ODDS - LOW_ODDS) * (BINS - 1)
    i = min(int(place), BINS - 2)
    return (i, 1 - (place - i)), (i + 1, place - i)


@dataclass
class Offset:
    """The log-odds by which a text's drafts are more likely than their scores say: mean and precision of a normal distribution."""

    mean: float
    precision: float = TEXT_SPREAD**-2

    def learn(self, prob: float, hit: bool) -> None:
        """Record that a draft of this probability was the pick, or was not (one step of Newton's method)."""
        self.precision += max(prob * (1 - prob), LEAST_INFORMATION)
        self.mean = min(max(self.mean + (hit - prob) / self.precision, -MOST_OFFSET), MOST_OFFSET)

    def fade(self) -> None:
        """Let a step pass."""
        self.precision += (TEXT_SPREAD**-2 - self.precision) / MEMORY


@dataclass
class Acceptance:
    """The estimates of one source, for greedy or for sampled decoding."""

    tables: list[Table] = field(default_factory=lambda: [Table() for _ in range(LAST_TABLE + 1)])
    levels: list[list[float]] = field(default_factory=list)
    """For each depth, the share of its parents' probability that its drafts have, by rank in the level, in a text of offset 0."""
    drafts: int = 0
    """Drafts of which `levels` is the mean."""
    mean: float = 0.0
    """The mean offset of recent texts."""
    texts: dict[int, Offset] = field(default_factory=dict)
    """Offsets by the numbers of the sequences being decoded."""

    def table(self, depth: int) -> Table:
        return self.tables[min(depth, LAST_TABLE)]

    def offset(self, sequence: int) -> Offset:
        """The offset of a sequence; of a new one the mean of those before."""
        return self.texts.setdefault(sequence, Offset(self.mean))

    def prob(self, sequence: int, depth: int, score: float) -> float:
        """The probability that a draft with this score is the pick, given that its parent is accepted."""
        return shifted(self.table(depth).prob(score), self.offset(sequence).mean)

    def expected(self, depths: int, sequences: Sequence[int]) -> list[list[float]]:
        """The path probabilities of the next draft's nodes, by depth, in a text such as the mean of these sequences.

        Depths that were never drafted are taken to be accepted as the last one that was.
        """
        offset = sum(self.offset(sequence).mean for sequence in sequences) / max(len(sequences), 1)
        mass, levels = 1.0, []
        for depth in range(depths):
            level = self.levels[min(depth, len(self.levels) - 1)] if self.levels else [FIRST]
            total = sum(level)
            scale = mass * shifted(total, offset) / total if total else 0.0
            levels.append([scale * share for share in level])
            mass = sum(levels[-1])
        return levels

    def learn(self, pool: Pool, source: object, sequence: int, depths: int, accepted: dict[int, int]) -> None:
        """Learn from a verified row, of which the source drafted so many depths. ``accepted``: the pick at each accepted node."""
        offset, paths, levels = self.offset(sequence), {0: 1.0}, [list[float]() for _ in range(depths)]
        for proposal in pool.proposals:
            node, parent = proposal.node, pool.parents[proposal.node]
            depth, table = pool.levels[parent], self.table(pool.levels[parent])
            if proposal.source is not source:
                continue
            if parent in paths and depth < depths:
                paths[node] = paths[parent] * table.prob(proposal.score)
                levels[depth].append(paths[node])
            if parent in accepted:
                hit = pool.tokens[node] == accepted[parent]
                offset.learn(min(self.prob(sequence, depth, proposal.score), MAX_PROB), hit)
                table.learn(proposal.score, hit)
        self.mean += FOLLOW * (offset.mean - self.mean)
        self._note(levels)

    def _note(self, levels: list[list[float]]) -> None:
        """Take the path probabilities of a draft's levels into the acceptance rates."""
        mass, weight = 1.0, max(1 / (self.drafts + 1), DRAFTS)
        self.drafts += 1
        for depth, level in enumerate(levels):
            total = sum(level)
            shares = [prob * min(1 / mass, MAX_PROB / total) for prob in sorted(level, reverse=True)]
            known = self.levels[depth] if depth < len(self.levels) else shares
            self.levels[depth : depth + 1] = [[old + weight * (new - old) for old, new in zip_longest(known, shares, fillvalue=0.0)]]
            mass = min(total, MAX_PROB * mass)
            if mass < LEAST_MASS:
                break

    def pass_by(self) -> None:
        """Let a step pass."""
        for offset in self.texts.values():
            offset.fade()

    def to_json(self) -> dict[str, Any]:
        """What holds for any text, as stored in a checkpoint; `from_json` is the inverse."""
        counts = [{"hits": table.hits, "trials": table.trials} for table in self.tables]
        tables = [{"depth": i, **{name: [round(count, 2) for count in row] for name, row in rows.items()}} for i, rows in enumerate(counts)]
        return {"levels": [[round(share, 4) for share in level] for level in self.levels], "calibration": tables}

    @staticmethod
    def from_json(stored: dict[str, Any]) -> Acceptance:
        """The inverse of `to_json`. Raises ValueError, TypeError or KeyError unless it is what that wrote."""
        levels = [[float(share) for share in level] for level in stored["levels"]]
        if not all(0 <= share <= 1 for level in levels for share in level):
            raise ValueError(f"acceptance rates lie between 0 and 1; got {str(levels)[:60]}")
        tables = [Table.from_json(table) for table in stored["calibration"]][: LAST_TABLE + 1]
        return Acceptance(tables + [Table() for _ in range(LAST_TABLE + 1 - len(tables))], levels, STORED_DRAFTS)


# The choice of a candidate tree: how deep to draft and how many nodes to verify, or none. A pass over a tree writes one token plus the sum
# of the path probabilities of its drafts in expectation (`Pool`), so the N most likely nodes are the best tree of N, and the best N is that
# of the most expected tokens per second (Sequoia, 2402.12374; OPT-Tree, 2406.17276). Before a draft the same choice is made among depths,
# by the path probabilities that recent drafts had.


@dataclass(frozen=True)
class Choice:
    """The depths to draft, the nodes to verify (the root included) and the seconds that the step is expected to take."""

    depths: int
    nodes: int
    seconds: float
    cost: float
    """Seconds times the steps left: the choice with the least is the fastest."""


def best_tree(
    depths: int,
    drafting: float,
    probs: Sequence[Sequence[float]],
    passes: Mapping[int, float],
    left: Callable[[Sequence[float]], float] = lambda tokens: 1 / sum(tokens),
) -> Choice:
    """Choose the size of a tree of so many depths, whose drafting takes or took so many seconds; its cost compares it with other depths.

    ``probs``: for each row, the path probabilities of its drafts in any order. ``passes``: the sizes to choose from in ascending order,
    nodes of a row, each with the seconds of a pass over them. ``left``: a measure of the steps left if each writes so many tokens to each
    row (`Draft.passes_left`), by default one in which only their sum counts.
    """
    sums = [list(accumulate(sorted(row, reverse=True), initial=1.0)) for row in probs]  # expected tokens, by nodes
    largest, best = max(map(len, sums)), Choice(depths, 1, 0.0, math.inf)
    for nodes, verifying in passes.items():
        seconds = drafting + verifying
        cost = seconds * left([row[min(nodes, len(row)) - 1] for row in sums])
        if cost < best.cost:  # of equals the smaller
            best = Choice(depths, nodes, seconds, cost)
        if nodes >= largest:
            break
    return best
