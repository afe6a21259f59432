"""Drafts for the beams of some rows, and the choice of those that a pass verifies.

The sources are those of greedy decoding. A drafter keeps one state per beam, which is copied when beams branch; drafters that use the
backbone's cache do not take part, because that cache has no row per beam. Only proposers that observe next-token distributions take part:
beam search needs alternative tokens, and an n-gram proposer knows only continuations it has seen. After nodes that have been verified
already, the backbone's own top-k tokens replace the drafts.

The drafts of a depth are ranked by the score of the whole sequence, and a step needs all drafts up to the lowest-ranked of its new beams.
With P_d(w) the probability that the first w drafts of depth d suffice, verifying w at each depth adds ``P_0(w) (1 + P_1(w) (1 + ...))``
expected steps.

Shape suffixes: D depths, W drafts of a depth, N nodes, V vocabulary, Y what is known after a token (see search.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.inference.beam.search import BeamTrie, Search
from headstart.inference.capture.captured import Stopwatch
from headstart.inference.engine.drafter_source import DrafterSource
from headstart.inference.engine.proposer import ProposerSource
from headstart.inference.engine.source import DraftScoring, Level
from headstart.inference.engine.tree import BEAM_WIDTH, TreeShape, padded_size
from headstart.inference.latency import Costs
from headstart.inference.policy import Policy
from headstart.support.pytree import list_tensors, map_tensors

UNITS = 36
"""Maximum number of drafts verified, in units of half the number of beams."""
DEPTHS = 12
"""Maximum number of depths drafted."""
PRIOR, MISSES, DEEPER = 2.0, 1.2, 0.8
"""A prior worth ``PRIOR`` steps: w drafts suffice with probability 1 - MISSES beams / w, times DEEPER for each further depth."""
DECAY = 0.995
"""Decay of the counts per pass, so that depths that were not drafted are retried."""
MIN_TOTAL = -1e8
"""Paths with a lower total score are not drafted."""
DRAFT_PART, HOST_PART = "beam search: a draft level", "beam search: steps"
"""Names of step parts in the cost model."""


class Breadth:
    """How often the first w drafts of depth d sufficed for a step, with so many beams; kept from call to call."""

    def __init__(self, beams: int) -> None:
        self.widths_W = max(1, beams // 2) * np.arange(1, UNITS + 1)
        self.prior_DW = np.outer(DEEPER ** np.arange(DEPTHS), PRIOR * (1 - MISSES * beams / self.widths_W).clip(min=0))
        self.hits_DW, self.seen_D1 = self.prior_DW.copy(), np.full((DEPTHS, 1), PRIOR)

    def learn(self, depth: int, need: float) -> None:
        """Record that a step needed the first ``need`` drafts of that depth; infinity: all of them did not suffice."""
        self.seen_D1[depth] += 1
        self.hits_DW[depth] += self.widths_W >= need

    def fade(self) -> None:
        """Decay the counts; called once per pass."""
        self.hits_DW = self.prior_DW + DECAY * (self.hits_DW - self.prior_DW)
        self.seen_D1 = PRIOR + DECAY * (self.seen_D1 - PRIOR)

    def steps(self, depths: int, nodes: int) -> dict[tuple[int, int], float]:
        """(depths, drafts verified at each) -> the steps that they are expected to add, of at most so many depths and nodes."""
        steps_DW = (self.hits_DW / self.seen_D1).cumprod(0).cumsum(0)
        plans = {(d + 1, int(w)): float(steps_DW[d, i]) for d in range(depths) for i, w in enumerate(self.widths_W) if (d + 1) * w <= nodes}
        return {(0, 0): 0.0} | plans


class Draft:
    """A drafted token: its score given what precedes it, and the drafts that follow it, by token."""

    def __init__(self, score: float = -math.inf) -> None:
        self.score = score
        self.below: dict[int, Draft] = {}

    def add(self, token: int, score: float) -> Draft:
        """The draft of that token behind this one, with the best of its scores."""
        draft = self.below.setdefault(token, Draft())
        draft.score = max(draft.score, score)
        return draft


class Row:
    """A prompt being continued, after ``pads`` positions of padding."""

    def __init__(self, number: int, pads: int, search: Search) -> None:
        self.number, self.pads, self.search, self.trie = number, pads, search, BeamTrie(search.prompt - pads)
        self.place = search.rows.index(number)
        self.last = [-1] * search.rules.beams
        """For each beam, the node of its second-to-last token, which is verified (-1: the last shared token)."""
        self.nodes: list[int] = []
        """For each beam, the node of its last token."""
        self.origins: list[int] = []
        """For each beam, the one that it continued in the steps of this pass."""
        self.steps = self.remaining = 0
        """The steps of this pass, and the maximum number of depths to draft for the next."""
        self.ranks: list[dict[tuple[int, int], int]] = []
        """By depth, the ranks of the drafts behind what was verified, by parent and token."""

    @property
    def newest(self) -> list[int]:
        """The last token of each beam."""
        return list(self.search.running.ids_BKT[self.place, :, -1].tolist())

    @property
    def known(self) -> list[Tensor | None]:
        """For each beam, the processed log-probabilities ``[V]`` after its last token if it was verified before."""
        return [self.trie.after[node][0] if node < self.trie.verified else None for node in self.nodes]

    def choose(self, drafts: list[Draft], depths: int, width: int) -> None:
        """Add the best drafts of each depth by total score to the trie. ``drafts``: those behind each beam."""
        level = list(zip(self.search.running.scores_BK[self.place].tolist(), self.nodes, drafts, strict=True))
        for _ in range(depths):
            found = []
            for above, node, draft in level:
                if node < self.trie.verified:
                    _replace(draft, self.trie.after[node][0], self.search.rules.candidates)
                totals = ((above + child.score, node, token, child) for token, child in draft.below.items())
                found += [entry for entry in totals if entry[0] > MIN_TOTAL]
            found.sort(key=lambda entry: -entry[0])
            self.ranks.append({(node, token): rank for rank, (_, node, token, _) in enumerate(found)})
            level = [(total, self.trie.add(node, token), child) for total, node, token, child in found[:width]]

    def follow(self, breadth: Breadth) -> bool:
        """Take note of a step of the search; returns True if the last tokens of its beams have been verified too."""
        origins = (self.search.running.origins_BKP[self.place, :, -1] % len(self.nodes)).tolist()  # numbered over all rows of the search
        self.last, self.origins = [self.nodes[beam] for beam in origins], [self.origins[beam] for beam in origins]
        added = list(zip(self.last, self.newest, strict=True))
        if self.steps < len(self.ranks):
            breadth.learn(self.steps, 1 + max(self.ranks[self.steps].get(node, math.inf) for node in added))
        self.steps += 1
        self.nodes = [self.trie.nodes[node] for node in added if node in self.trie.nodes]
        return len(self.nodes) == len(added)

    def keep(self) -> list[int]:
        """Keep the nodes of the new beams alone; returns their old numbers."""
        kept, self.last = self.trie.keep(self.last, self.newest)
        return kept


def _replace(draft: Draft, scores_V: Tensor, count: int) -> None:
    """Let the most likely tokens take the place of what was drafted behind this draft; what was drafted behind them stays."""
    best, drafted = scores_V.topk(min(count, len(scores_V))), draft.below
    draft.below = {}
    for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        draft.add(token, score).below = drafted[token].below if token in drafted else {}


class Drafting:
    """Drafts for one call. The rows of the drafters' states are beams: all beams of the first row, then those of the second, ..."""

    def __init__(self, policy: Policy, beams: int, breadth: Breadth, shape: TreeShape | None) -> None:
        self.beams, self.breadth, self.shape = beams, breadth, shape
        self.width = shape.width if shape is not None else max(BEAM_WIDTH, 2 * beams)
        self.drafters = [source for source in policy.of_kind(DrafterSource) if not source.drafter.uses_backbone_cache]
        self.observing = [source for source in policy.of_kind(ProposerSource) if source.observe_top_k]
        self.deepest = max([0, *(source.depth_of(shape) for source in self.drafters), *([DEPTHS] if self.observing else [])])

    def start(self, features: Features) -> None:
        """Start new rows from the features of their prompts."""
        rows = [row for row in range(len(features.tokens_BT)) for _ in range(self.beams)]
        for source in self.drafters:
            source.join([], [], features)
            source.catch_up(features.tokens_BT.shape[1])
            source.select(rows)

    def follow(self, rows: list[Row]) -> None:
        """Replace the beams by those that the rows' steps have led to."""
        if self.drafters:
            longest = max(row.steps for row in rows)
            parts = [row.trie.along([row.trie.path(node)[-row.steps :] for node in row.last], longest) for row in rows]
            columns = zip(*map(list_tensors, parts), strict=True)
            features = map_tensors(lambda _: torch.cat(next(columns)), parts[0])
            for source in self.drafters:
                source.select([b * self.beams + beam for b, row in enumerate(rows) for beam in row.origins])
                source.append(features)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        for source in self.drafters:
            source.select([row * self.beams + beam for row in rows for beam in range(self.beams)])

    def observe(self, tokens: list[int], after_NYV: Tensor) -> None:
        """Pass the tokens of verified nodes and the most likely next tokens to the proposers."""
        for source in self.observing:
            best = after_NYV[: len(tokens), 0].topk(min(source.observe_top_k, after_NYV.shape[-1]))
            source.observe(tokens, best.indices.tolist(), best.values.tolist())

    def draft(self, rows: list[Row], costs: Costs) -> None:
        """Add drafts for the beams of each row to its trie."""
        with Stopwatch() as watch:
            depths, width = self._plan(rows, costs)
            drafts = self._drafts(rows, depths) if depths else []
            for b, row in enumerate(rows):
                row.ranks = []
                if depths:
                    row.choose(drafts[b * self.beams : (b + 1) * self.beams], min(depths, row.remaining), width)
        if watch.valid and depths:
            costs.add(DRAFT_PART, len(rows), 1, watch.seconds / depths)

    def _plan(self, rows: list[Row], costs: Costs) -> tuple[int, int]:
        """How many depths to draft and how many drafts of each to verify: the fastest, or the best within the shape."""
        shape, breadth, deepest = self.shape, self.breadth, min(self.deepest, max(row.remaining for row in rows))
        breadth.fade()
        if shape is not None:
            plans = breadth.steps(min(shape.depth or deepest, deepest), shape.nodes - self.beams)
            return max(plans, key=plans.__getitem__)
        plans = breadth.steps(deepest, int(breadth.widths_W[-1]))
        sizes = {plan: padded_size(self.beams + plan[0] * plan[1]) for plan in plans}
        passes = costs.of_passes(len(rows), sorted({*sizes.values()}))
        drafting, host = (costs.of_part(part, len(rows), 1) or 0.0 for part in (DRAFT_PART, HOST_PART))
        return max(plans, key=lambda plan: (1 + plans[plan]) / (passes[sizes[plan]] + plan[0] * drafting + host))

    def _drafts(self, rows: list[Row], deepest: int) -> list[Draft]:
        """What the sources draft behind each beam."""
        roots, known = [Draft() for row in rows for _ in row.nodes], [after_V for row in rows for after_V in row.known]
        for proposer in self.observing:
            texts = [text[row.pads :] for row in rows for text in row.search.running.ids_BKT[row.place].tolist()]
            for slot, (root, text) in enumerate(zip(roots, texts, strict=True)):
                proposed, found = proposer.propose_after(slot, text, deepest), [root]
                for token, parent, score in zip(proposed.tokens, proposed.parents, proposed.scores, strict=True):
                    found.append(found[parent + 1].add(token, score))
        longest = max(row.search.length - row.pads for row in rows)
        for source in self.drafters:
            source.prepare(longest, self.width, None, source.depth_of(self.shape))
            level, above = source.roots([row.trie.tokens[node] for row in rows for node in row.nodes]), [[root] for root in roots]
            for depth in range(min(deepest, source.depth_of(self.shape))):
                drafted = source.step(depth, level, self.width, DraftScoring())
                level = drafted if depth else _corrected(drafted, known)
                values = (value_BW.tolist() for value_BW in (level.tokens_BW, level.parents_BW, level.scores_BW))
                for beam, (nodes, *of_beam) in enumerate(zip(above, *values, strict=True)):
                    above[beam] = [nodes[parent].add(token, score) for token, parent, score in zip(*of_beam, strict=True)]
        return roots


def _corrected(level: Level, known: list[Tensor | None]) -> Level:
    """The drafts of depth 0, replaced by the most likely tokens for the beams where these are known."""
    tokens_BW, scores_BW, totals_BW = level.tokens_BW.clone(), level.scores_BW.clone(), level.totals_BW.clone()
    for beam, after_V in enumerate(known):
        if after_V is not None:
            scores_BW[beam], tokens_BW[beam] = after_V.topk(tokens_BW.shape[1])
            totals_BW[beam] = scores_BW[beam]
    return replace(level, tokens_BW=tokens_BW, scores_BW=scores_BW, totals_BW=totals_BW)
