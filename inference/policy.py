"""What is drafted in a step, what of it is verified, and what is learned from that.

All is one choice (`best_tree`) by estimated acceptance and latency: before a source drafts, by what its drafts were like lately, and after
all have, by the drafts. A source that is not expected to pay is tried now and then all the same, with as few depths and nodes as lose
least: it has `TRIAL_SHARE` of the decoding time to lose. Statistics are kept from call to call. Shape suffixes: B batch, N tree nodes,
V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from headstart.inference.capture.captured import Stopwatch
from headstart.inference.engine.acceptance import Choice, best_tree
from headstart.inference.engine.source import Rows, Source
from headstart.inference.engine.tree import TREE_SIZES, CandidateTree, Pool, graph_size
from headstart.inference.latency import FIRST_NODES, PASS, CostModel, Costs

Kind = TypeVar("Kind", bound=Source)

TRIAL_SHARE = 0.01
"""Fraction of the decoding time that drafts may lose that are not expected to pay, all sources together."""
MOST_BUDGET = 0.5
"""The most that a source may save up for it, in plain steps; a new one has so much."""
SETTLED, STANDS, RESTS = 8, 3, 16
"""Steps of a text after which a choice of depths stands for further steps, since choosing takes time too, and for how many; and the steps
for which a source rests that is not worth asking."""


class Trial(NamedTuple):
    """A draft that is not expected to pay: its source, the seconds expected of its step, and how many of them are lost."""

    source: Source
    seconds: float
    loss: float


class Plan(NamedTuple):
    """How many depths a source drafts in a step; 0: none."""

    depths: int
    trial: Trial | None = None


class Part(NamedTuple):
    """What a source drafted in a step. ``late``: seconds for reading what was written while it did not draft."""

    depths: int
    seconds: float
    late: float = 0.0


@dataclass(frozen=True)
class Draft:
    """What was drafted in a step: a pool for each row."""

    rows: Rows
    costs: Costs
    pools: Sequence[Pool]
    parts: Mapping[Source, Part] = field(default_factory=dict)
    trial: Trial | None = None

    @property
    def empty(self) -> bool:
        """True if no source has drafted a token."""
        return all(len(pool.tokens) == 1 for pool in self.pools)

    @property
    def seconds(self) -> float:
        """Drafting time."""
        return sum(part.seconds + part.late for part in self.parts.values())

    def missed(self, depths: int) -> list[float]:
        """For each depth, the probability that none of the nodes so far is accepted there, a mean over rows."""
        found = [0.0] * depths
        for pool in self.pools:
            for prob, level in zip(pool.path_probs()[1:], pool.levels[1:], strict=True):
                if level <= depths:
                    found[level - 1] += prob / len(self.pools)
        return [max(1 - prob, 0.0) for prob in found]

    def rested(self, tree: CandidateTree) -> bool:
        """True if drafts were not made, or not verified, since they would have cost more than they save, or to time such a step."""
        return self.rows.shape is None and tree.size == 1 and (not self.empty or not self.parts) and any(self.rows.remaining)


class Policy:
    """The sources of a model with costs and statistics; without sources, autoregressive decoding.

    ``padded``: all passes are padded (`graph_size`). ``chains``: the backbone verifies no trees, but one path from the root.
    """

    def __init__(self, sources: Sequence[Source] = (), padded: bool = False, chains: bool = False) -> None:
        self.sources, self.padded, self.chains = list(sources), padded, chains
        self.costs = CostModel()
        self.budgets = dict.fromkeys(self.sources, MOST_BUDGET)
        """Plain steps' time that each source may lose in trials."""
        self.beams: dict[int, Any] = {}
        """What beam search has learned, by the number of beams."""
        self.steps = 0
        """The number of steps since a text began."""
        self._chosen: dict[tuple[Source, int], tuple[int, int]] = {}
        """For each source and number of rows, the depths that were chosen, and the step at which they are chosen anew."""
        self._plain_steps = 0
        """The number of plain steps since a draft."""

    @contextmanager
    def beside(self, source: Source | None) -> Iterator[None]:
        """Within this context a further source drafts, before the others; None: none."""
        added = [] if source is None else [source]
        self.sources = added + self.sources
        try:
            yield
        finally:
            self.sources = self.sources[len(added) :]

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        """The sources of that class."""
        return [source for source in self.sources if isinstance(source, kind)]

    def start(self, sampled: bool) -> None:
        """Start a call to generate."""
        for source in self.sources:
            source.start(sampled)
            source.acceptance.texts.clear()

    def begin(self, sequences: Sequence[int]) -> None:
        """Texts of these numbers begin."""
        self.steps, self._chosen = 0, {}
        for source in self.sources:
            for sequence in sequences:
                source.acceptance.texts.pop(sequence, None)

    # Drafting.

    def draft(self, rows: Rows, costs: Costs) -> Draft:
        """Let the sources draft, in turn."""
        draft = Draft(rows, costs, [Pool(root) for root in rows.roots])
        for source in self.sources:
            plan = self.plan(draft, source)
            if plan.depths:
                with Stopwatch() as watch:
                    source.keep_up(rows)
                    late = watch.lap()
                    source.draft(rows, draft.pools, plan.depths)
                part = Part(min(plan.depths, max(rows.remaining)), watch.seconds - late, late)
                draft = replace(draft, parts={**draft.parts, source: part}, trial=plan.trial or draft.trial)
        return draft

    def plan(self, draft: Draft, source: Source) -> Plan:
        """How many depths the source drafts beside what was drafted before it."""
        rows, costs, count = draft.rows, draft.costs, len(draft.pools)
        remaining = max([0, *rows.remaining])
        if rows.shape is not None:
            return Plan(source.fixed_depths(rows.shape, remaining))
        if costs.plain_due(count) or count > source.most_rows or not remaining:
            return Plan(0)
        counts = [depths for depths in source.counts if depths <= remaining] or [remaining]  # others would be captured for one draft
        if costs.tree_due(count):
            return Plan(max(depths for depths in counts if depths <= max(source.depth, counts[0])))
        depths, until = self._chosen.get((source, count), (0, 0))
        if draft.empty and self.steps < until:
            return Plan(max((fitting for fitting in counts if fitting <= depths), default=0))
        choices = self._choices(draft, source, counts)
        best = min(choices, key=lambda choice: choice.cost)
        deeper = [choice for choice in choices if best.depths < choice.depths <= source.depth and choice.depths in source.counts]
        trial = min(deeper, key=lambda choice: choice.cost, default=best)
        loss = trial.seconds * (1 - best.cost / trial.cost)
        if deeper and min(loss / costs.of_pass(count, 1), MOST_BUDGET) <= self.budgets.get(source, 0.0):
            return Plan(trial.depths, Trial(source, trial.seconds, loss))
        if draft.empty:
            stands = RESTS if not best.depths else STANDS if self.steps > SETTLED else 0
            self._chosen[source, count] = best.depths, self.steps + 1 + stands
        return Plan(best.depths)

    def _choices(self, draft: Draft, source: Source, counts: list[int]) -> list[Choice]:
        """What is expected of no draft of this source, and of one of as many depths as each of the counts, for the mean of the rows."""
        count = len(draft.pools)
        ranked = ([prob for prob, _ in self._ranked(pool)] for pool in draft.pools)
        known = [sum(probs) / count for probs in zip_longest(*ranked, fillvalue=0.0)]
        levels, missed = source.acceptance.expected(counts[-1], draft.rows.sequences), draft.missed(counts[-1])
        new = [[missed[depth] * prob for prob in (level[:1] if self.chains else level)] for depth, level in enumerate(levels)]
        passes = self._passes(draft, max(1 + len(known) + sum(map(len, new)), 2))
        choices, drafts = [best_tree(0, draft.seconds, [known], passes)], {nodes: passes[nodes] for nodes in passes if nodes > 1}
        for depths in counts:
            name, size = source.timed_as(count, depths)
            seconds = draft.costs.of_part(name, count, size)
            seconds = source.first_cost * passes[1] * depths if seconds is None else seconds
            probs = known + [prob for level in new[:depths] for prob in level]
            choices.append(best_tree(depths, draft.seconds + seconds, [probs], drafts))
        return choices

    def _passes(self, draft: Draft, largest: int) -> dict[int, float]:
        """The sizes to choose from for trees of at most so many nodes, each with the seconds of a pass."""
        if self.padded:
            sizes = sorted({min(graph_size(size), graph_size(largest)) for size in TREE_SIZES})
        else:
            sizes = [*(size for size in TREE_SIZES if size < largest), largest]
        return draft.costs.of_passes(len(draft.pools), sizes)

    def choose(self, draft: Draft) -> CandidateTree:
        """The tree to verify."""
        ranked = [self._ranked(pool) for pool in draft.pools]
        nodes = draft.rows.shape.nodes if draft.rows.shape is not None else self._size(draft, ranked)
        return CandidateTree.of(draft.pools, [[0, *sorted(node for _, node in row[: nodes - 1])] for row in ranked])

    def _ranked(self, pool: Pool) -> list[tuple[float, int]]:
        """The nodes that may be verified, the most likely first."""
        return pool.best_path() if self.chains else pool.ranked()

    def _size(self, draft: Draft, ranked: list[list[tuple[float, int]]]) -> int:
        largest = 1 + max(map(len, ranked))
        if largest == 1:
            return 1
        passes = self._passes(draft, largest)
        if draft.costs.tree_due(len(ranked)):
            return max(size for size in passes if size <= FIRST_NODES)
        if draft.trial is not None:
            del passes[1]
        return best_tree(0, draft.seconds, [[prob for prob, _ in row] for row in ranked], passes, draft.rows.passes_left).nodes

    # Learning.

    def learn(self, draft: Draft, tree: CandidateTree, paths: list[list[int]], picks: list[list[int]], logits_BNV: Tensor) -> Draft:
        """Update every source's statistics from the picks at the accepted nodes.

        Returns the draft with the time that this took for sources that observe every node.
        """
        self.steps += 1
        if draft.trial is not None:
            self._spend(draft, draft.trial.loss)
        for row, sequence in enumerate(draft.rows.sequences if draft.parts else ()):
            accepted = {tree.pooled[row][node]: picks[row][node] for node in paths[row]}
            for source, part in draft.parts.items():
                source.acceptance.learn(draft.pools[row], source, sequence, min(part.depths, draft.rows.remaining[row]), accepted)
        for source in self.sources:
            source.acceptance.pass_by()
        return self._observed(draft, tree, logits_BNV)

    @staticmethod
    def _observed(draft: Draft, tree: CandidateTree, logits_BNV: Tensor) -> Draft:
        observing = [source for source in draft.parts if source.observe_top_k]
        if not observing:
            return draft
        with Stopwatch() as watch:
            best = logits_BNV.topk(min(max(source.observe_top_k for source in observing), logits_BNV.shape[-1]))
            logprobs = (best.values.float() - logits_BNV.float().logsumexp(-1, keepdim=True)).tolist()
            top_tokens = best.indices.tolist()
            for row, tokens in enumerate(tree.tokens):
                count = len(tokens)
                for source in observing:
                    source.observe(tokens, top_tokens[row][:count], logprobs[row][:count])
        seconds = watch.seconds / len(observing)
        longer = {source: part._replace(seconds=part.seconds + seconds) for source, part in draft.parts.items() if source in observing}
        return replace(draft, parts={**draft.parts, **longer})

    def time(self, draft: Draft, tree: CandidateTree, seconds: float) -> None:
        """Record the time of a step, its drafting time separately."""
        if not self.sources:
            return
        rows, costs, plain = len(draft.pools), draft.costs, draft.costs.of_pass(len(draft.pools), 1)
        self._plain_steps = 0 if draft.parts else self._plain_steps + 1
        if tree.size > 1 or self._plain_steps > 1:  # a draft leaves less of the weights in the caches
            costs.add(PASS, rows, graph_size(tree.size) if self.padded else tree.size, seconds - draft.seconds)
        for source, part in draft.parts.items():
            name, size = source.timed_as(rows, part.depths)
            costs.add(name, rows, size, part.seconds)
        for source in self.budgets:
            self.budgets[source] = min(self.budgets[source] + TRIAL_SHARE * seconds / plain / len(self.budgets), MOST_BUDGET)
        if draft.trial is not None:  # what it took beyond what was expected is lost too
            self._spend(draft, seconds - draft.trial.seconds)

    def _spend(self, draft: Draft, seconds: float) -> None:
        """Take so many seconds from the budget of the source that was tried; what else the machine did is not its debt."""
        assert draft.trial is not None
        left = self.budgets[draft.trial.source] - seconds / draft.costs.of_pass(len(draft.pools), 1)
        self.budgets[draft.trial.source] = max(left, -MOST_BUDGET)
