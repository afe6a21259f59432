"""Drafts for the beams of some rows, ranked by beam score, and the choice of those that a pass verifies.

The sources are those of greedy decoding. A drafter keeps one state per beam, which is copied when beams branch; drafters that use the
backbone's cache do not take part, because that cache has no row per beam. Only proposers that observe next-token distributions take part:
beam search needs alternative tokens, and an n-gram proposer knows only continuations it has seen. Where a beam's last token has already
been verified, its top-k tokens replace the drafts.

The features of trie nodes, kept as long as the nodes, so that drafters can read them once a beam continues through them.

Shape suffixes: B rows or batch, R beams of all rows or lists of nodes, W drafts of a beam and depth, N nodes, M most likely next tokens, P
nodes of a list.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headstart.heads.backbone.features import Features
from headstart.inference.adaptive.latency import Costs
from headstart.inference.beam.search import DEPTHS, Beam, Breadth, Plan
from headstart.inference.beam.trie import TopK
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.engine.tree import BEAM_WIDTH, TreeShape, padded_size
from headstart.inference.policy import Policy
from headstart.inference.sources.drafter_source import DrafterSource
from headstart.inference.sources.levels import Level
from headstart.inference.sources.proposer_source import ProposerSource
from headstart.inference.sources.source import DraftScoring
from headstart.support.pytree import map_tensors


class NodeFeatures:
    """Features by row and node number."""

    def __init__(self, like: Features) -> None:
        """Start without nodes, with as many rows as these features have."""
        self.features = map_tensors(lambda tensor: tensor[:, :0], like)
        self.before: list[int] = []
        """How many nodes each row had before the last `add`, whose nodes are stored from index ``longest`` on."""
        self.longest = 0

    def add(self, features: Features, before: list[int]) -> None:
        """Add the features of each row's newly verified nodes, which are numbered from ``before[row]`` on."""
        kept = self.features
        taps = None
        if kept.taps is not None and features.taps is not None:
            taps = {tap: torch.cat([one, features.taps[tap]], 1) for tap, one in kept.taps.items()}
        tokens, hidden = ((kept.tokens_BT, features.tokens_BT), (kept.hidden_BTD, features.hidden_BTD))
        self.longest, self.before = kept.tokens_BT.shape[1], before
        self.features = Features(torch.cat(tokens, 1), torch.cat(hidden, 1), taps)

    def of(self, rows: list[int], nodes: list[list[int]]) -> Features:
        """The features of each list of nodes, ``nodes[i]`` of row ``rows[i]``, right-padded."""
        longest, device = max(map(len, nodes)), self.features.tokens_BT.device
        indices = [[self._index(row, node) for node in one] + [0] * (longest - len(one)) for row, one in zip(rows, nodes, strict=True)]
        counts_R1 = torch.tensor([len(one) for one in nodes], device=device)[:, None]
        index_RP = torch.tensor(indices, dtype=torch.int64, device=device).view(len(rows), longest)
        of_rows = self.features.rows(torch.tensor(rows, device=device))
        return of_rows.gather(index_RP, torch.arange(longest, device=device) < counts_R1)

    def keep(self, nodes: list[list[int]]) -> None:
        """Keep only these nodes of each row and renumber them from 0."""
        self.features = self.of(list(range(len(nodes))), nodes)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.features = self.features.rows(torch.tensor(rows, device=self.features.tokens_BT.device))

    def _index(self, row: int, node: int) -> int:
        return node if node < self.before[row] else self.longest + node - self.before[row]


PLAN_INTERVAL = 8
"""Passes between two plans when plans depend on measured times."""
MIN_TOTAL = -1e8
"""Paths with a lower total score are not drafted."""
DRAFT_PART, HOST_PART = "beam search: a draft level", "beam search: steps"
"""Names of step parts in the cost model."""

Path = tuple[int, tuple[int, ...]]
"""The index of a beam, and the tokens drafted after its last token."""


@dataclass(frozen=True)
class RowBeams:
    """The beams of one row, to draft for."""

    beams: list[Beam]
    prompt: list[int]
    remaining: int
    """Maximum number of depths to draft."""
    known: list[dict[tuple[int, ...], TopK]]
    """For each beam, the top k after its last token and after drafts that follow it, where they have been verified."""

    @property
    def fresh(self) -> bool:
        """True if ``known`` is empty for every beam."""
        return not any(self.known)


@dataclass(frozen=True)
class Drafts:
    """The drafts of one row: the rank of each by depth, and those chosen for verification, parents before children."""

    ranks: list[dict[Path, int]]
    chosen: list[Path]
    breadth: Breadth | None = None
    """Updated with the ranks that turned out to be needed."""

    def learn(self, depth: int, paths: list[Path]) -> None:
        """Record the paths of the new beams at that depth."""
        if self.breadth is not None and depth < len(self.ranks):
            ranks = [self.ranks[depth].get(path) for path in paths]
            self.breadth.learn(depth, None if None in ranks else 1 + max(rank for rank in ranks if rank is not None))


class Drafting:
    """Drafts for one call. The rows of the drafters' states are beams: all beams of the first row, then those of the second, ...

    ``breadths``: one for rows without known top-k tokens, one for rows with some (`RowBeams.fresh`).
    """

    def __init__(self, policy: Policy, breadths: tuple[Breadth, Breadth], shape: TreeShape | None) -> None:
        self.policy, self.breadths, self.shape = policy, breadths, shape
        self.beams = breadths[0].beams
        self.width = shape.width if shape is not None else max(BEAM_WIDTH, 2 * self.beams)
        self.drafters = [source for source in policy.of_kind(DrafterSource) if source.own_cache]
        self.observing = [source for source in policy.of_kind(ProposerSource) if source.observe_top_k]
        self.deepest = max([0, *(source.depth_of(shape) for source in self.drafters), *([DEPTHS] if self.observing else [])])
        self.observe_top_k = max((source.observe_top_k for source in self.observing), default=0)
        self.features: NodeFeatures
        """The features of verified nodes, read by drafters."""
        self.passes = 0
        self.plans = (Plan((), 0.0), Plan((), 0.0))

    # The beams.

    def start(self, features: Features) -> None:
        """Start new rows from the features of their prompts."""
        rows = [row for row in range(len(features.tokens_BT)) for _ in range(self.beams)]
        for source in self.drafters:
            source.join([], [], features)
            source.catch_up(features.tokens_BT.shape[1])
            source.select(rows)
        if self.drafters:
            self.features = NodeFeatures(features)

    def add(self, features: Features, verified: list[int]) -> None:
        """Add the features of the nodes just verified; ``verified``: how many verified nodes each row had before."""
        if self.drafters:
            self.features.add(features, verified)

    def follow(self, origins: list[int], rows: list[int], nodes: list[list[int]]) -> None:
        """Replace the beams: new beam i continues beam ``origins[i]`` by the nodes ``nodes[i]`` of row ``rows[i]``."""
        if self.drafters:
            features = self.features.of(rows, nodes)
            for source in self.drafters:
                source.select(origins)
                source.append(features)

    def keep(self, nodes: list[list[int]]) -> None:
        """Keep only these nodes of each row and renumber them from 0."""
        if self.drafters:
            self.features.keep(nodes)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        for source in self.drafters:
            source.select([row * self.beams + beam for row in rows for beam in range(self.beams)])
        if self.drafters and rows:
            self.features.select(rows)

    def observe(self, tokens: list[int], top_tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Pass the token of each verified node and its most likely next tokens ``[N, M]`` to the proposers."""
        for source in self.observing:
            source.observe(tokens, top_tokens[:, : source.observe_top_k].tolist(), logprobs[:, : source.observe_top_k].tolist())

    # Planning.

    def draft(self, rows: list[RowBeams], costs: Costs) -> list[Drafts]:
        """Draft for the beams of each row."""
        if not self.deepest:
            return [Drafts([], []) for _ in rows]
        with Stopwatch() as watch:
            self._plan(rows, costs)
            plans = [self.plans[not row.fresh] for row in rows]
            deepest = max(len(plan.widths) for plan in plans)
            if not deepest:
                return [Drafts([], []) for _ in rows]
            scores: list[dict[tuple[int, ...], float]] = [{} for row in rows for _ in row.beams]
            self._propose(rows, deepest, scores)
            longest = max(len(row.prompt) + len(row.beams[0].tokens) for row in rows)
            for source in self.drafters:
                source.prepare(longest, self.width, None, source.depth_of(self.shape))
                self._grow(source, rows, deepest, scores)
            K = self.beams
            drafts = [self._rank(row, scores[b * K : (b + 1) * K], plans[b]) for b, row in enumerate(rows)]
        if watch.valid:
            costs.add(DRAFT_PART, len(rows), 1, watch.seconds / deepest)
        return drafts

    def _plan(self, rows: list[RowBeams], costs: Costs) -> None:
        """Choose how many drafts to verify at each depth: the fastest plan by measured times, or the largest that the shape allows."""
        remaining = max(row.remaining for row in rows)
        for breadth in self.breadths:
            breadth.fade()
        self.passes += 1
        if self.shape is not None or self.passes % PLAN_INTERVAL == 1 or max(len(plan.widths) for plan in self.plans) > remaining:
            fresh, known = (self._best_plan(breadth, len(rows), remaining, costs) for breadth in self.breadths)
            self.plans = (fresh, known)

    def _best_plan(self, breadth: Breadth, rows: int, remaining: int, costs: Costs) -> Plan:
        if self.shape is not None:
            units = min((self.shape.nodes - self.beams) // breadth.unit, len(breadth.widths) - 1)
            deepest = min(self.shape.depth or self.deepest, self.deepest, remaining)
            return breadth.plans(deepest)[units] if units > 0 else Plan((), 0.0)
        candidates = breadth.plans(min(self.deepest, remaining))
        plans = {padded_size(self.beams + sum(plan.widths)): plan for plan in candidates}  # the best plan of each size
        drafting, host = (costs.of_part(part, rows, 1) or 0.0 for part in (DRAFT_PART, HOST_PART))
        seconds = {nodes: costs.of_pass(rows, nodes) + len(plan.widths) * drafting + host for nodes, plan in plans.items()}
        return max(plans.items(), key=lambda one: (1 + one[1].steps) / seconds[one[0]])[1]

    # The drafts.

    def _propose(self, rows: list[RowBeams], deepest: int, scores: list[dict[tuple[int, ...], float]]) -> None:
        sequences = [row.prompt + beam.tokens for row in rows for beam in row.beams] if self.observing else []
        for source in self.observing:
            for slot, (tokens, known) in enumerate(zip(sequences, scores, strict=True)):
                proposed = source.propose_after(slot, tokens, deepest)
                paths: list[tuple[int, ...]] = []
                for token, parent, score in zip(proposed.tokens, proposed.parents, proposed.scores, strict=True):
                    paths.append((*(paths[parent] if parent >= 0 else ()), token))
                    known[paths[-1]] = max(score, known.get(paths[-1], score))

    def _grow(self, source: DrafterSource, rows: list[RowBeams], deepest: int, scores: list[dict[tuple[int, ...], float]]) -> None:
        """Run a drafter level by level."""
        level = source.roots([beam.tokens[-1] for row in rows for beam in row.beams])
        paths: list[list[tuple[int, ...]]] = [[()] for _ in scores]
        for depth in range(min(deepest, source.depth_of(self.shape))):
            level = source.step(depth, level, self.width, DraftScoring())
            if not depth:
                level = _corrected(level, [known.get(()) for row in rows for known in row.known])
            drafted = zip(level.tokens_BW.tolist(), level.parents_BW.tolist(), level.scores_BW.tolist(), strict=True)
            for beam, (known, (tokens, parents, values)) in enumerate(zip(scores, drafted, strict=True)):
                paths[beam] = [(*paths[beam][parent], token) for parent, token in zip(parents, tokens, strict=True)]
                for path, value in zip(paths[beam], values, strict=True):
                    known[path] = max(value, known.get(path, value))

    def _rank(self, row: RowBeams, scores: list[dict[tuple[int, ...], float]], plan: Plan) -> Drafts:
        """Rank a row's drafts at each depth by total score and choose the planned number among those whose parents are chosen."""
        levels: list[list[tuple[float, Path]]] = [[] for _ in plan.widths[: row.remaining]]
        for number, (beam, known, drafted) in enumerate(zip(row.beams, row.known, scores, strict=True)):
            own = {path: score for path, score in drafted.items() if path[:-1] not in known}
            for above, top in known.items():
                own |= {(*above, token): value for token, value in zip(top.tokens_M.tolist(), top.logprobs_M.tolist(), strict=True)}
            totals: dict[tuple[int, ...], float] = {(): float(beam.score)}
            for path in sorted(own, key=len):
                total = totals.get(path[:-1], MIN_TOTAL) + own[path]
                if len(path) <= len(levels) and total > MIN_TOTAL:
                    totals[path] = total
                    levels[len(path) - 1].append((total, (number, path)))
        ranks: list[dict[Path, int]] = []
        verified: set[Path] = {(number, ()) for number in range(len(row.beams))}
        chosen: list[Path] = []
        for level, width in zip(levels, plan.widths, strict=False):
            level.sort(key=lambda one: -one[0])
            ranks.append({path: rank for rank, (_, path) in enumerate(level)})
            able = [(number, path) for _, (number, path) in level if (number, path[:-1]) in verified][:width]
            verified.update(able)
            chosen += able
        return Drafts(ranks, chosen, self.breadths[not row.fresh])


def _corrected(level: Level, known: list[TopK | None]) -> Level:
    """The drafts of depth 0, replaced by the backbone's own top k for the beams where it is known."""
    beams = [beam for beam, one in enumerate(known) if one is not None]
    if not beams:
        return level
    W, device = level.tokens_BW.shape[1], level.tokens_BW.device

    def replaced(drafted_BW: Tensor, exact: list[np.ndarray], fill: float) -> Tensor:
        rows = np.full((len(exact), W), fill)
        for row, one_M in zip(rows, exact, strict=True):
            row[: len(one_M)] = one_M[:W]
        return drafted_BW.index_copy(0, torch.tensor(beams, device=device), torch.from_numpy(rows).to(drafted_BW))

    tokens = [one.tokens_M for one in known if one is not None]
    logprobs = [one.logprobs_M for one in known if one is not None]
    scores_BW, totals_BW = replaced(level.scores_BW, logprobs, 10 * MIN_TOTAL), replaced(level.totals_BW, logprobs, 10 * MIN_TOTAL)
    return replace(level, tokens_BW=replaced(level.tokens_BW, tokens, 0), scores_BW=scores_BW, totals_BW=totals_BW)
