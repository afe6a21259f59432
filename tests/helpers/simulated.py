"""A simulated machine, and heads whose drafts are accepted at known rates: what is chosen, and what the best fixed tree would bring.

Time passes only where a machine says so, and chance is seeded, so that every run is the same on any machine.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from headstart.heads.backbone.features import Features
from headstart.inference.capture import captured
from headstart.inference.engine.acceptance import shifted
from headstart.inference.engine.source import Accepted, Rows, Source
from headstart.inference.engine.tree import TREE_SIZES, Pool
from headstart.inference.policy import Policy


class Clock:
    """The time of a machine, in place of the process's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slowdown = 1.0

    def perf_counter(self) -> float:
        return self.now

    def let_pass(self, seconds: float) -> None:
        self.now += self.slowdown * seconds


@contextmanager
def simulating() -> Iterator[Clock]:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "time", clock)
        yield clock


@dataclass(frozen=True)
class Machine:
    """Seconds of a pass by nodes, and of a draft by depths; times vary by ``noise``, a standard deviation of their logarithm."""

    name: str
    passes: tuple[tuple[int, float], ...]
    first_depth: float
    further_depth: float
    noise: float = 0.05

    def of_pass(self, nodes: int) -> float:
        known = list(self.passes)
        for (low, before), (high, after) in zip(known, known[1:], strict=False):
            if nodes <= high:
                return before + (after - before) * (nodes - low) / (high - low)
        (low, before), (high, after) = known[-2:]
        return after + (after - before) * (nodes - high) / (high - low)

    def of_draft(self, depths: int) -> float:
        return self.first_depth + (depths - 1) * self.further_depth if depths else 0.0


SMOLLM2 = Machine(
    "SmolLM2, compiled", ((1, 7.9), (2, 8.6), (4, 10.4), (8, 12.6), (12, 16.5), (16, 20.0), (32, 36.7), (60, 69.7)), 0.95, 0.55
)
MACHINES = (
    SMOLLM2,
    Machine("GPU, memory-bound", ((1, 20.0), (16, 20.4), (64, 22.0)), 1.6, 1.2),
    Machine("GPU, cheap drafts", ((1, 30.0), (64, 31.0)), 0.5, 0.3),
    Machine("CPU, steep", ((1, 5.0), (2, 8.0), (4, 14.0), (64, 200.0)), 0.8, 0.7),
    Machine("CPU, dear drafts", ((1, 10.0), (8, 13.0), (64, 60.0)), 5.0, 4.0),
    Machine("loaded", SMOLLM2.passes, 0.95, 0.55, noise=0.25),
)


@dataclass(frozen=True)
class Task:
    """Texts in which the first draft is accepted with ``first`` and later ones, given their parents, with ``later``.

    ``claims``: the log-odds by which the heads overrate themselves in such texts, which scores do not show.
    """

    name: str
    first: float
    later: float
    claims: float = 0.0


CHAT, MATHS, RAG = Task("chat", 0.80, 0.80), Task("maths", 0.78, 0.80, -0.3), Task("questions on a text", 0.58, 0.62)
CODE, TRANSLATION = Task("code", 0.42, 0.52, 0.4), Task("translation", 0.10, 0.25, 1.5)
USELESS, PERFECT = Task("nothing accepted", 0.0, 0.0, 6.0), Task("perfect", 0.98, 0.98)
TASKS = (CHAT, MATHS, RAG, CODE, TRANSLATION, USELESS, PERFECT)


@dataclass
class Heads:
    """Drafts a beam of ``width``: each node has a true probability about the task's, and a score that says it with some error."""

    depth: int = 5
    width: int = 2
    error: float = 0.8
    """Standard deviation of the error of a score, in log-odds."""
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def children(self, task: Task, depth: int) -> list[tuple[float, float]]:
        """True and claimed probabilities of the children of a node, together at most 1."""
        mean = task.later if depth else task.first
        first = shifted(mean, self.chance.gauss(0, 1.2)) if mean else 0.0
        true = [first * 0.85, first * 0.15] + [0.02 * first] * 6
        return [(one, shifted(max(one, 1e-3), task.claims + self.chance.gauss(0, self.error))) for one in true[: max(self.width, 1)]]


class SimulatedSource(Source):
    """The heads as a source, on a machine."""

    first_cost = 0.06

    def __init__(self, heads: Heads, machine: Machine, clock: Clock, deepest: int | None = None) -> None:
        super().__init__("0 Simulated", heads.depth)
        self.heads, self.machine, self.clock, self.deepest = heads, machine, clock, deepest or heads.depth
        self.task = CHAT
        self.true: dict[int, float] = {}

    @property
    def counts(self) -> list[int]:
        return sorted({1, 2, self.depth, self.deepest})

    def join(self, sequences: list[int], tokens: list[list[int]], features: Features) -> None:
        """It has no state."""

    def extend(self, accepted: Accepted) -> None:
        """It has no state."""

    def draft(self, rows: Rows, pools: Sequence[Pool], depths: int) -> None:
        self.clock.let_pass(varied(self.machine, self.heads.chance, self.machine.of_draft(depths)))
        self.true = grow(self.heads, self.task, pools[0], depths, self, lambda d, score: self.prob(rows, 0, d, score))


def grow(heads: Heads, task: Task, pool: Pool, depths: int, source: Any, prob: Callable[[int, float], float]) -> dict[int, float]:
    """Draft into the pool: the ``width`` most likely nodes of each level. Returns the true probability of each node, given its parent."""
    level, true = [(0, 0.0)], {}
    for depth in range(depths):
        found = []
        for parent, total in level:
            children = heads.children(task, depth)
            found += [(total + math.log(claimed), parent, real, math.log(claimed)) for real, claimed in children]
        level = []
        for total, parent, real, score in sorted(found, reverse=True)[: heads.width]:
            node = pool.add(source, parent, 1000 + len(pool.tokens), score, prob(depth, score))
            true[node] = real
            level.append((node, total))
    return true


def varied(machine: Machine, chance: random.Random, seconds: float) -> float:
    return seconds * math.exp(chance.gauss(0, machine.noise) - machine.noise**2 / 2)


@cache
def taus(task: Task, depth: int, width: int, error: float, drafts: int = 1500) -> dict[tuple[int, int], float]:
    """Expected tokens of a step with fixed trees, by depths and nodes."""
    heads, sums = Heads(depth, width, error, random.Random(1)), dict[tuple[int, int], float]()
    for _ in range(drafts):
        for depths in range(1, depth + 1):
            pool = Pool(0)
            true = grow(heads, task, pool, depths, 0, lambda _, score: math.exp(score))
            reached = [1.0]
            for node in range(1, len(pool.tokens)):
                reached.append(reached[pool.parents[node]] * true[node])
            tokens, ranked = 1.0, [node for _, node in pool.ranked()]
            for nodes in range(2, len(pool.tokens) + 1):
                tokens += reached[ranked[nodes - 2]]
                if nodes in TREE_SIZES or nodes == len(pool.tokens):
                    sums[depths, nodes] = sums.get((depths, nodes), 0.0) + tokens / drafts
    return sums


def best_fixed(machine: Machine, task: Task, heads: Heads) -> float:
    """Tokens per second of the fastest fixed tree, or of plain decoding."""
    found = taus(task, heads.depth, heads.width, heads.error)
    trees = [tau / (machine.of_draft(depths) + machine.of_pass(nodes)) for (depths, nodes), tau in found.items()]
    return max(1 / machine.of_pass(1), *trees)


@dataclass(frozen=True)
class Step:
    """A step of a text: the tokens before it, the tokens that its tree and its time are expected to bring and to take, and its choice."""

    before: int
    tokens: float
    seconds: float
    depths: int
    nodes: int


def rate(steps: Iterable[Step]) -> float:
    """Expected tokens per second."""
    listed = list(steps)
    return sum(step.tokens for step in listed) / sum(step.seconds for step in listed)


BUSY = 10.0
"""How many times as long a step takes while the machine is busy."""


class Decoding:
    """Decodes simulated texts one after the other as the decoding loop does; ``busy``: in which steps other programs slow it down.

    The expected seconds of a step are those of an idle machine.
    """

    def __init__(self, machine: Machine, heads: Heads, clock: Clock, busy: Callable[[int], bool] = lambda step: False) -> None:
        self.machine, self.heads, self.clock, self.busy, self.steps = machine, heads, clock, busy, 0
        self.source = SimulatedSource(heads, machine, clock)
        self.policy = Policy([self.source])

    def text(self, task: Task, tokens: int) -> list[Step]:
        self.source.task = task
        self.policy.start(sampled=False)
        self.policy.begin([0])
        steps, written = list[Step](), 0
        while written < tokens:
            count, step = self._step(written, tokens)
            steps.append(step)
            written += count
        return steps

    def _step(self, written: int, tokens: int) -> tuple[int, Step]:
        policy, before = self.policy, self.clock.now
        self.clock.slowdown, self.steps = BUSY if self.busy(self.steps) else 1.0, self.steps + 1
        draft = policy.draft(Rows([0], [tokens - written - 1], [0]), policy.costs.at(0))
        tree = policy.choose(draft)
        self.clock.let_pass(varied(self.machine, self.heads.chance, self.machine.of_pass(tree.size)))
        path, picks, expected = self._verified(draft.pools[0], tree.pooled[0])
        draft = policy.learn(draft, tree, [path], [picks], torch.empty(0))
        policy.time(draft, tree, self.clock.now - before)
        depths = draft.parts[self.source].depths if draft.parts else 0
        return len(path), Step(written, expected, self.machine.of_draft(depths) + self.machine.of_pass(tree.size), depths, tree.size)

    def _verified(self, pool: Pool, kept: list[int]) -> tuple[list[int], list[int], float]:
        """The accepted path through the tree, the pick at each node, and the number of tokens that were to be expected."""
        if len(kept) == 1:
            return [0], [1], 1.0
        true = self.source.true
        reached, picks = {0: 1.0}, dict.fromkeys(kept, 1)
        for node in kept[1:]:
            reached[node] = reached[pool.parents[node]] * true[node]
        for node in kept:
            chance = self.heads.chance.random()
            for child in (child for child in true if pool.parents[child] == node):
                chance -= true[child]
                if chance < 0:
                    picks[node] = pool.tokens[child]
                    break
        path = [0]
        while following := [node for node in kept if node and pool.parents[node] == path[-1] and pool.tokens[node] == picks[path[-1]]]:
            path += following
        return [kept.index(node) for node in path], [picks[node] for node in kept], sum(reached.values())
