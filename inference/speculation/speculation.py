"""Manages the sources of drafts: selects those that draft in a step, chooses the tree size, and updates statistics from verified trees.

A row's tree of N nodes yields one token plus the sum of the path probabilities of its candidates in expectation. The size with the most
expected tokens per second is chosen; size 1 is autoregressive decoding. All rows of a batch have the same size, and the slowest rows count
most. Statistics are kept from call to call. Shape suffixes: B batch, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TypeVar

from torch import Tensor

from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.engine.cost_model import CostModel
from headstart.inference.engine.sizes import FEW_TREE_SIZES, TREE_SIZES, graph_size, octave
from headstart.inference.engine.tree import CandidateTree, TreeShape, root_only
from headstart.inference.sources.draft import Draft
from headstart.inference.sources.source import EMA_WEIGHT, Source
from headstart.inference.sources.source_stats import MIN_BALANCE
from headstart.inference.speculation.credit import credits

Kind = TypeVar("Kind", bound=Source)


class Speculation:
    """The sources of a model with costs and statistics; without sources, autoregressive decoding.

    ``few_sizes``: trees of batches have few sizes, since each takes long to capture. ``padded``: all passes are padded (`graph_size`).
    """

    def __init__(self, sources: Sequence[Source] = (), few_sizes: bool = False, padded: bool = False) -> None:
        self.sources, self.few_sizes, self.padded = list(sources), few_sizes, padded
        self.cost_model = CostModel()
        self.costs = self.cost_model.at(0)
        self.rates: dict[tuple[bool, int], float] = {}
        """Recent tokens per second of greedy (False) and sampled (True) decoding, by `octave` of the number of rows: geometric means."""
        self.sampled = False
        self.plain_steps = 0
        """The number of autoregressive steps since a draft."""

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

    def rate(self, rows: int) -> float:
        """Recent tokens per second with about that many rows; 0: not known yet."""
        return self.rates.get((self.sampled, octave(rows)), 0.0)

    def start(self, sampled: bool) -> None:
        """Start a call to generate."""
        self.sampled = sampled
        for source in self.sources:
            source.start(sampled)

    def use_costs(self, context: int, captured: bool) -> None:
        """Set the costs of the next step; ``context``: the length of the longest row."""
        if self.sources:
            self.costs = self.cost_model.at(context, captured)

    # Drafting.

    def active(self, shape: TreeShape | None, rows: int) -> list[Source]:
        """The sources that draft in this step: all for a fixed shape; else those not backing off, none if a plain step is to be timed."""
        if shape is not None:
            return self.sources
        if not self.sources or self.costs.plain_due(rows, self.rate(rows)):
            return []
        return [source for source in self.sources if rows <= source.most_rows and source.learned.stats[octave(rows)].active()]

    def choose(self, draft: Draft) -> CandidateTree:
        """Choose the tree to verify; sets ``draft.kept`` to its nodes in the pools."""
        nodes = draft.shape.nodes if draft.shape is not None else self._size(draft)
        if nodes == 1:
            draft.kept = [[0] for _ in draft.pools]
            return root_only([pool.tokens[0] for pool in draft.pools])
        draft.kept = [pool.best(nodes) for pool in draft.pools]
        return CandidateTree.of(draft.pools, draft.kept)

    def _size(self, draft: Draft) -> int:
        rows, largest = len(draft.pools), max(len(pool.tokens) for pool in draft.pools)
        if largest == 1:
            return 1
        expected = [list(accumulate((prob for prob, _ in pool.ranked()), initial=1.0)) for pool in draft.pools]   # expected tokens by nodes
        drafting = sum(draft.seconds.values())
        best, least = 1, math.inf
        if self.padded:
            sizes = sorted({min(graph_size(size), graph_size(largest)) for size in TREE_SIZES})
        elif self.few_sizes and rows > 1:
            sizes = [size for size in FEW_TREE_SIZES if size <= largest]
        else:
            sizes = [*(size for size in TREE_SIZES if size < largest), largest]
        for nodes in sizes:
            tokens = [by_nodes[min(nodes, len(by_nodes)) - 1] for by_nodes in expected]
            seconds = (drafting + self.costs.of_pass(rows, nodes)) * draft.passes_left(tokens)
            if seconds < least:
                best, least = nodes, seconds
        return best

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
        if not draft.seconds:
            return
        for sequence, tokens, parents, picked in zip(draft.sequences, tree.tokens, tree.parents, picks, strict=True):
            for source in draft.seconds:
                assert isinstance(source, Source)
                source.verified(sequence, tokens, parents, picked)
        for pool, nodes, path, picked in zip(draft.pools, draft.kept, paths, picks, strict=True):
            accepted = {nodes[node]: picked[node] for node in path}
            for source in self.sources:
                source.learn(pool, accepted, draft.depths.get(source, 0))

    def time(self, draft: Draft, tree: CandidateTree, paths: list[list[int]], seconds: float) -> None:
        """Record the time of a step, its drafting time separately; a source that costs more than it brings backs off."""
        if not self.sources:
            return
        rows = len(paths)
        self.plain_steps = 0 if draft.seconds else self.plain_steps + 1
        if draft.seconds:
            self.costs.count_drafted(rows)
        nodes = graph_size(tree.size) if self.padded else tree.size
        if tree.size > 1 or self.plain_steps > 1 or not self.costs.plain_timed(rows):   # a draft leaves less of the weights in the caches
            self.costs.add_pass(rows, nodes, seconds - sum(draft.seconds.values()))
        if draft.shape is not None:
            return
        tokens = sum(weight * len(path) for weight, path in zip(draft.weights or [1.0] * len(paths), paths, strict=True))
        rate = tokens / seconds
        before = self.rate(rows) or rate
        self.rates[self.sampled, octave(rows)] = before * (rate / before) ** EMA_WEIGHT
        if draft.seconds:
            self._judge(draft, paths, nodes, tokens, seconds)

    def _judge(self, draft: Draft, paths: list[list[int]], nodes: int, tokens: float, seconds: float) -> None:
        """Record what each source gained: its tokens' value, at the rate without it, minus its drafting and its share of verification.

        Only the source with the lowest standing backs off, if below 0: without it, others may be credited with its tokens.
        """
        credit, share = credits(self.sources, draft, paths)
        rows, total = len(paths), sum(share.values())
        step = self.costs.of_pass(rows, 1)
        extra = self.costs.of_pass(rows, nodes) - step
        drafted = {source: source.learned.stats[octave(rows)] for source in self.sources if source in draft.seconds}
        for source, stats in drafted.items():
            cost = draft.seconds[source] + (extra * share[source] / total if total else 0.0)
            rate = stats.rate_without(tokens - credit[source], seconds - cost, rows, step)
            stats.note((credit[source] / rate - cost) / step)
        worst = min(drafted.values(), key=lambda stats: stats.standing)
        if worst.standing < 0:
            worst.back_off(len(drafted))
            for stats in drafted.values():
                stats.balance = max(stats.balance, MIN_BALANCE)
