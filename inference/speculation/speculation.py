"""Manages the sources of drafts: which draft in a step, how deep, what tree is verified, and what is learned from it.

All three are one choice (`best_tree`) by estimated acceptance and latency: before a source drafts, by what its drafts were like lately, and
after all have, by the drafts. A source that is not expected to pay is asked now and then all the same, with as few depths and nodes as
lose least. What that may lose comes from its purse, which holds `TRIAL_SHARE` of the decoding time; a part of it is for the beginning of
a text, which may differ from the last one. Statistics are kept from call to call. Shape suffixes: B batch, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TypeVar

from torch import Tensor

from headstart.inference.adaptive.best_tree import Choice, best_tree
from headstart.inference.adaptive.latency import FIRST_NODES, CostModel
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.engine.tree import TREE_SIZES, CandidateTree, TreeShape, graph_size, root_only
from headstart.inference.sources.source import Draft, Source

Kind = TypeVar("Kind", bound=Source)

TRIAL_SHARE = 0.01
"""Fraction of the decoding time that drafts may lose that are not expected to pay, all sources together."""
FULL_PURSE = 1.0
"""The most that a purse holds, in plain steps."""
RESERVE, BEGINNING = 0.5, 32
"""What of it is kept for the first steps of a text, and how many these are."""
SETTLED, PLANNED = 8, 3
"""Steps after which, and further steps for which, a source drafts as deep as was chosen, since choosing takes time too."""
LONGEST_PAUSE = 16
"""Steps after which a source that is not worth asking is considered again."""


class Speculation:
    """The sources of a model with costs and statistics; without sources, autoregressive decoding.

    ``padded``: all passes are padded (`graph_size`).
    """

    def __init__(self, sources: Sequence[Source] = (), padded: bool = False) -> None:
        self.sources, self.padded = list(sources), padded
        self.cost_model = CostModel()
        self.costs = self.cost_model.at(0)
        self.plain_steps = 0
        """The number of plain steps since a draft."""
        self.steps = 0
        """The number of steps since a text began."""

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
        self.steps = 0
        for source in self.sources:
            source.pause = source.planned = 0
            for sequence in sequences:
                source.acceptance.texts.pop(sequence, None)

    def use_costs(self, context: int, made: str) -> None:
        """Set the costs of the next step; ``context``: the length of the longest row."""
        if self.sources:
            self.costs = self.cost_model.at(context, made)

    # Drafting.

    def active(self, shape: TreeShape | None, rows: int) -> list[Source]:
        """The sources to ask in this step: all for a fixed shape; else those that do not pause, none if a plain step is to be timed."""
        if shape is not None:
            return self.sources
        if not self.sources or self.costs.plain_due(rows):
            return []
        return [source for source in self.sources if rows <= source.most_rows and (not source.pause or self.costs.tree_due(rows))]

    def draft(self, draft: Draft) -> None:
        """Let the sources draft, in turn."""
        for source in self.active(draft.shape, len(draft.pools)):
            if depths := self.depths(draft, source):
                with Stopwatch() as watch:
                    source.draft(draft, depths)
                draft.seconds[source], draft.depths[source] = watch.seconds, min(depths, max(draft.remaining))
                if not watch.valid:
                    made = source.timed_as(len(draft.pools), draft.depths[source])
                    self.costs.forget_part(made, len(draft.pools), draft.depths[source])

    def depths(self, draft: Draft, source: Source) -> int:
        """The number of depths that the source drafts in this step; 0: none."""
        remaining = max([0, *draft.remaining])
        if draft.shape is not None:
            return source.fixed_depths(draft.shape, remaining)
        if self.costs.tree_due(len(draft.pools)) or not remaining:
            return min(source.depth, remaining)
        if source.planned and not any(len(pool.tokens) > 1 for pool in draft.pools):
            source.planned -= 1
            return min(source.plan, remaining)
        counts = [count for count in source.counts if count <= remaining] or [remaining]
        choices = self._choices(draft, source, counts)
        best = min(choices, key=lambda choice: choice.cost)
        source.plan, source.planned = best.depths, PLANNED if best.depths and self.steps > SETTLED else 0
        deeper = [choice for choice in choices if best.depths < choice.depths <= source.depth]
        if deeper and self._affords(draft, source, trial := min(deeper, key=lambda choice: choice.cost), best):
            return trial.depths
        return best.depths

    def _choices(self, draft: Draft, source: Source, counts: list[int]) -> list[Choice]:
        """What is expected of no draft of this source, and of one of as many depths as each of the counts, for the mean of the rows."""
        rows, before = len(draft.pools), sum(draft.seconds.values())
        ranked = ([prob for prob, _ in pool.ranked()] for pool in draft.pools)
        known = [sum(probs) / rows for probs in zip_longest(*ranked, fillvalue=0.0)]
        levels, missed = source.acceptance.expected(counts[-1], draft.sequences), draft.missed(counts[-1])
        new = [[missed[depth] * prob for prob in level] for depth, level in enumerate(levels)]
        passes = self._passes(rows, max(1 + len(known) + sum(map(len, new)), 2))
        choices, drafts = [best_tree(0, before, [known], passes)], {nodes: passes[nodes] for nodes in passes if nodes > 1}
        for count in counts:
            seconds = self.costs.of_part(source.timed_as(rows, count), rows, count)
            seconds = source.first_cost * passes[1] * count if seconds is None else seconds
            choices.append(best_tree(count, before + seconds, [known + [prob for level in new[:count] for prob in level]], drafts))
        return choices

    def _affords(self, draft: Draft, source: Source, trial: Choice, best: Choice) -> bool:
        """True if the source is to draft deeper than what is expected to be best, to learn what that brings; its purse pays for it.

        A source that is not to draft at all, even where no other has drafted, pauses until it can pay.
        """
        loss = trial.seconds * (1 - best.cost / trial.cost) / self.costs.of_pass(len(draft.pools), 1)
        kept = RESERVE if self.steps > BEGINNING else 0.0
        short = min(loss, FULL_PURSE - kept) + kept - source.purse
        if short <= 0:
            source.purse -= loss
            draft.least, draft.trial = 2, (source, trial.seconds)
        elif not best.depths and not any(len(pool.tokens) > 1 for pool in draft.pools):
            source.pause = min(math.ceil(short / TRIAL_SHARE), LONGEST_PAUSE)
        return short <= 0

    def _passes(self, rows: int, largest: int) -> dict[int, float]:
        """The sizes to choose from for trees of at most so many nodes, each with the seconds of a pass."""
        if self.padded:
            sizes = sorted({min(graph_size(size), graph_size(largest)) for size in TREE_SIZES})
        else:
            sizes = [*(size for size in TREE_SIZES if size < largest), largest]
        return {size: self.costs.of_pass(rows, size) for size in sizes}

    def choose(self, draft: Draft) -> CandidateTree:
        """Choose the tree to verify; sets ``draft.kept`` to its nodes in the pools."""
        ranked = [pool.ranked() for pool in draft.pools]
        nodes = draft.shape.nodes if draft.shape is not None else self._size(draft, ranked)
        draft.kept = [[0, *sorted(node for _, node in row[: nodes - 1])] for row in ranked]
        drafted = any(len(row) > 1 for row in draft.kept)
        return CandidateTree.of(draft.pools, draft.kept) if drafted else root_only([pool.tokens[0] for pool in draft.pools])

    def _size(self, draft: Draft, ranked: list[list[tuple[float, int]]]) -> int:
        rows, largest = len(ranked), 1 + max(map(len, ranked))
        if largest == 1:
            return 1
        passes = self._passes(rows, largest)
        if self.costs.tree_due(rows):
            return max(size for size in passes if size <= FIRST_NODES)
        passes = {nodes: seconds for nodes, seconds in passes.items() if nodes >= min(draft.least, largest)}
        probs = [[prob for prob, _ in row] for row in ranked]
        return best_tree(0, sum(draft.seconds.values()), probs, passes, draft.passes_left).nodes

    # Learning.

    def observe(self, draft: Draft, tree: CandidateTree, logits_BNV: Tensor) -> None:
        """Pass the most likely next tokens of each verified node to the sources that drafted and observe them."""
        observing = [source for source in self.sources if source.observe_top_k and source in draft.seconds]
        if not observing:
            return
        with Stopwatch() as watch:
            best = logits_BNV.topk(min(max(source.observe_top_k for source in observing), logits_BNV.shape[-1]))
            logprobs = (best.values.float() - logits_BNV.float().logsumexp(-1, keepdim=True)).tolist()
            top_tokens = best.indices.tolist()
            for row, tokens in enumerate(tree.tokens):
                count = len(tokens)
                for source in observing:
                    source.observe(tokens, top_tokens[row][:count], logprobs[row][:count])
        for source in observing:
            draft.seconds[source] += watch.seconds / len(observing)

    def learn(self, draft: Draft, tree: CandidateTree, paths: list[list[int]], picks: list[list[int]]) -> None:
        """Update every source's statistics from the picks at the accepted nodes, and show the verified tree to the sources that drafted."""
        self.steps += 1
        drafted = [source for source in self.sources if source in draft.seconds]
        for row, sequence in enumerate(draft.sequences if drafted else ()):
            accepted = {draft.kept[row][node]: picks[row][node] for node in paths[row]}
            for source in drafted:
                source.verified(sequence, tree.tokens[row], tree.parents[row], picks[row])
                source.acceptance.note(draft.pools[row], source, min(draft.depths[source], draft.remaining[row]))
                source.acceptance.learn(draft.pools[row], sequence, source, accepted)
        for source in self.sources:
            source.pause = max(source.pause - 1, 0)
            source.acceptance.pass_by()

    def time(self, draft: Draft, tree: CandidateTree, paths: list[list[int]], seconds: float) -> None:
        """Record the time of a step, its drafting time separately."""
        if not self.sources:
            return
        rows = len(paths)
        self.plain_steps = 0 if draft.seconds else self.plain_steps + 1
        nodes = graph_size(tree.size) if self.padded else tree.size
        if tree.size > 1 or self.plain_steps > 1:  # a draft leaves less of the weights in the caches
            self.costs.add_pass(rows, nodes, seconds - sum(draft.seconds.values()))
        if draft.trial is not None:  # what it took beyond what was expected
            over = (seconds - draft.trial[1]) / self.costs.of_pass(rows, 1)
            draft.trial[0].purse = max(draft.trial[0].purse - over, -FULL_PURSE)  # what else the machine did is not the source's debt
        for source, drafting in draft.seconds.items():
            assert isinstance(source, Source)
            self.costs.add_part(source.timed_as(rows, draft.depths[source]), rows, draft.depths[source], drafting)
        for source in self.sources:
            earned = TRIAL_SHARE * seconds / self.costs.of_pass(rows, 1) / len(self.sources)
            source.purse = min(source.purse + earned, FULL_PURSE)
