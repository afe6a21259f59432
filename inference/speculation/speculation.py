"""What is drafted for a pass, and how much of it is worth reading: trained heads and proposers in one tree, sized by expected speed.

Expected tokens of a pass over N nodes are ``rows + sum of the chances of the N likeliest nodes``; the size read is the one with the
most expected tokens a second, 1 (plain decoding) among the choices. One more depth is drafted only if the tokens it may bring are
worth the time it takes. All rows of a batch share one size, and the slowest of them count most. What is learned here stays with the
heads from call to call.

Shape suffixes: B batch, P positions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from headstart.heads.base import Drafter
from headstart.inference.capture.capture import Captured, Capturer
from headstart.inference.engine.tree import CandidateTree, Pool, TreeShape, root_only
from headstart.inference.sources.expansion import DraftScoring, Growth, Level, root_level
from headstart.inference.sources.proposer import Proposer
from headstart.inference.speculation.calibration import Calibration
from headstart.inference.speculation.cost_model import SIZES, CostsByLength
from headstart.inference.speculation.draft import Draft
from headstart.inference.speculation.source_stats import NEW, SourceStats

WIDTH = 8
"""Nodes of a depth that are followed, where no shape is given."""
FAR = 12
"""Proposers may guess so many tokens ahead."""
AGAIN = 0.002
"""How much better a depth is thought of with each time it was left out: it is tried again after some hundred passes."""
OFFERS = 24
"""Nodes a proposer may offer for a row."""


@dataclass
class Learned:
    """What decoding has taught of the sources."""

    calibration: Calibration
    source_stats: dict[int, SourceStats]
    """By source."""
    expanding: list[list[float]]
    """Of each drafter, per depth, how often a draft of its was accepted there, when its parent was."""
    rate: float = 0.0
    """Tokens a second, of late."""


class Speculation:
    """The sources of one backbone's drafts, by number: first the drafters, then the proposers."""

    def __init__(self, drafters: Sequence[Drafter], proposers: Sequence[Proposer], capturer: Capturer) -> None:
        self.drafters, self.proposers = list(drafters), list(proposers)
        self.growths = [Growth(drafter, capturer) for drafter in drafters]
        self.names = [f"{i} {type(drafter).__name__}" for i, drafter in enumerate(drafters)] + [one.name for one in proposers]
        self.by_length = CostsByLength()
        self.costs = self.by_length.at(0)
        self.by_mode: dict[bool, Learned] = {}
        """What has been learned of greedy (False) and of sampled texts."""
        self.attend(False)

    def attend(self, sampled: bool) -> None:
        """From now on texts are sampled, or greedy: what drafts are worth differs, so each has its own."""
        if sampled not in self.by_mode:
            source_stats = {i: SourceStats() for i in range(len(self.names))}
            self.by_mode[sampled] = Learned(Calibration(), source_stats, [[0.7] * drafter.depth for drafter in self.drafters])
        self.learned = self.by_mode[sampled]

    @property
    def disturbed(self) -> int:
        """Steps of drafters so far whose time says nothing (see `Captured`)."""
        return sum(growth.disturbed for growth in self.growths)

    def begin(self, read: Captured, context: int) -> None:
        """A pass begins, by ``read``, behind texts of so many tokens, the longest of the rows."""
        self.costs = self.by_length.at(context)
        self.prefill_at = (context, read.captures_made, read.disturbed + self.disturbed)

    def tells(self, read: Captured) -> bool:
        """Whether the times of the pass say something of the next ones. Those of Python are forgotten once passes are recorded."""
        context, recorded, disturbed = self.prefill_at
        if read.captures_made > recorded == 0:
            self.by_length.forget()
            self.costs = self.by_length.at(context)
        return read.disturbed + self.disturbed == disturbed

    def open(self, row: int, tokens: list[int]) -> None:
        """A new text in that row: prompt and root."""
        for proposer in self.proposers:
            proposer.open(row, tokens)

    def extend(self, row: int, tokens: list[int]) -> None:
        """What the row has written."""
        for proposer in self.proposers:
            proposer.extend(row, tokens)

    def see(self, draft: Draft, tree: CandidateTree, logits_BNV: Tensor) -> None:
        """Show the proposers that drafted and prepare_draft what the backbone says of the nodes it has read."""
        watching = [source for source in draft.seconds if source >= len(self.drafters) and self._proposer(source).watches]
        if not watching:
            return
        start = time.perf_counter()
        most = min(max(self._proposer(source).watches for source in watching), logits_BNV.shape[-1])
        best = logits_BNV.topk(most)
        logprobs = (best.values.float() - logits_BNV.float().logsumexp(-1, keepdim=True)).tolist()
        likeliest = best.indices.tolist()
        for row, tokens in enumerate(tree.tokens):
            count = len(tokens)
            for source in watching:
                self._proposer(source).see(tokens, likeliest[row][:count], logprobs[row][:count])
        for source in watching:
            draft.seconds[source] += (time.perf_counter() - start) / len(watching)

    def _proposer(self, source: int) -> Proposer:
        return self.proposers[source - len(self.drafters)]

    # Drafting.

    def sources(self, rows: int, shape: TreeShape | None) -> list[int]:
        """Those that draft in this pass. Until a plain step has been timed, none."""
        if shape is not None:
            return list(self.learned.source_stats)
        if not self.costs.knows(rows):
            return []
        return [source for source, source_stats in self.learned.source_stats.items() if source_stats.active()]

    def propose(self, draft: Draft, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Let the proposers among the sources hang their nodes into the pools."""
        for source in sources:
            if source < len(self.drafters):
                continue
            for row in rows:
                self._proposer(source).catch_up(row)
            start = time.perf_counter()
            for pool, room, row in zip(draft.pools, draft.room, rows, strict=True):
                if room > 0:
                    self._offer(draft, source, pool, row, min(room, FAR))
            draft.seconds[source] = time.perf_counter() - start

    def _offer(self, draft: Draft, source: int, pool: Pool, row: int, depth: int) -> None:
        offered = self._proposer(source).propose(row, depth, OFFERS)
        places: list[int] = []
        for token, parent, score in zip(offered.tokens, offered.parents, offered.scores, strict=True):
            above = 0 if parent < 0 else places[parent]
            chance = self._chance(draft, source, pool.depths[above] + 1, score)
            places.append(pool.add(source, above, token, score, chance))

    def _chance(self, draft: Draft, source: int, depth: int, score: float) -> float:
        return self.learned.calibration.table(self.names[source], depth).chance(score) if draft.calibrated else math.exp(score)

    def grow(self, draft: Draft, source: int, state: Any, scoring: DraftScoring, shape: TreeShape | None) -> Any:
        """Let a drafter draft depth by depth; its state after that."""
        growth, drafter = self.growths[source], self.drafters[source]
        depth = min(shape.depth or drafter.depth, drafter.depth) if shape is not None else drafter.depth
        width = shape.width if shape is not None else WIDTH
        level, places = root_level([pool.tokens[0] for pool in draft.pools], drafter.backbone.device), [[0] for _ in draft.pools]
        for k in range(min(depth, max(draft.room, default=0))):
            if shape is None and k and not self._deeper(draft, source, places, k):
                break
            start, recorded, disturbed = time.perf_counter(), growth.levels[0].captures_made, growth.disturbed
            level, state = growth.level(k, state, level, width, scoring)
            places = self._hang(draft, source, level, places)
            draft.levels[source] = k + 1
            if growth.levels[0].captures_made > recorded == 0:
                self.by_length.forget(f"level of {self.names[source]}")
            if growth.disturbed == disturbed:
                self.costs.add(f"level of {self.names[source]}", len(draft.pools), time.perf_counter() - start)
        return state

    def _hang(self, draft: Draft, source: int, level: Level, above: list[list[int]]) -> list[list[int]]:
        """The level's nodes, in the pools; their places there (-1: nowhere, for want of room)."""
        rows = zip(level.tokens_BW.tolist(), level.parents_BW.tolist(), level.scores_BW.tolist(), strict=True)
        found = []
        for pool, room, places, (tokens, parents, scores) in zip(draft.pools, draft.room, above, rows, strict=True):
            own = []
            for token, parent, score in zip(tokens, parents, scores, strict=True):
                node = places[parent]
                if node < 0 or pool.depths[node] >= room or not score > -1e9:
                    own.append(-1)
                    continue
                chance = self._chance(draft, source, pool.depths[node] + 1, score)
                own.append(pool.add(source, node, token, score, chance))
            found.append(own)
        return found

    def _deeper(self, draft: Draft, source: int, places: list[list[int]], k: int) -> bool:
        """Whether depth k is worth drafting: what it may bring, at the speed of late, against what a depth and a node more to read take.

        Left out, it is thought better of little by little, so that it is tried again.
        """
        expanding = self.learned.expanding[source]
        if not self.learned.rate:
            return True
        mass = 0.0
        for pool, own in zip(draft.pools, places, strict=True):
            reach = pool.reach()
            mass += min(sum(reach[node] for node in set(own) if node >= 0), 1.0)
        rows = len(draft.pools)
        node = (self.costs.of_pass(rows, WIDTH) - self.costs.of_pass(rows, 1)) / (WIDTH - 1)
        cost = self.costs.part(f"level of {self.names[source]}", rows) + node
        if mass * expanding[k] > self.learned.rate * cost:
            return True
        expanding[k] += AGAIN * (1 - expanding[k])
        return False

    # Choosing.

    def choose(self, draft: Draft, shape: TreeShape | None) -> tuple[CandidateTree, list[list[int]]]:
        """The tree to read, and which nodes of each pool it holds."""
        nodes = shape.nodes if shape is not None else self._size(draft)
        if nodes == 1:
            return root_only([pool.tokens[0] for pool in draft.pools]), [[0] for _ in draft.pools]
        kept = [pool.best(nodes) for pool in draft.pools]
        return CandidateTree.of(draft.pools, kept), kept

    def _size(self, draft: Draft) -> int:
        rows, most = len(draft.pools), max(len(pool.tokens) for pool in draft.pools)
        if most == 1:
            return 1
        expected = [list(accumulate((chance for chance, _ in pool.ranked()), initial=1.0)) for pool in draft.pools]   # by nodes
        spent = sum(draft.seconds.values())
        best, least = 1, math.inf
        for nodes in (*(n for n in SIZES if n < most), most):
            tokens = [own[min(nodes, len(own)) - 1] for own in expected]
            time = (spent + self.costs.of_pass(rows, nodes)) * draft.passes_left(tokens)
            if time < least:
                best, least = nodes, time
        return best

    # Learning.

    def learn(self, draft: Draft, kept: list[list[int]], paths: list[list[int]], picks: list[list[int]]) -> None:
        """What turned out: every guess below an accepted node was the pick or was not."""
        if not draft.seconds:
            return
        for pool, nodes, path, picked in zip(draft.pools, kept, paths, picks, strict=True):
            self._score(pool, {nodes[place]: picked[place] for place in path}, draft.levels)

    def judge(self, draft: Draft, kept: list[list[int]], paths: list[list[int]], seconds: float) -> None:
        """What the pass wrote is owed to some source; a source that costs more than it brings rests."""
        tokens = sum(map(len, paths))
        self.learned.rate = tokens / seconds if not self.learned.rate else self.learned.rate + NEW * (tokens / seconds - self.learned.rate)
        if not draft.seconds:
            return
        credit, share = dict.fromkeys(self.learned.source_stats, 0.0), dict.fromkeys(self.learned.source_stats, 0.0)
        for pool, nodes, path in zip(draft.pools, kept, paths, strict=True):
            owners: dict[int, set[int]] = {}
            for guess in pool.proposals:
                owners.setdefault(guess.node, set()).add(guess.source)
            for node in nodes[1:]:
                for source in owners[node]:
                    share[source] += 1 / len(owners[node])
            for source in credit:
                credit[source] += _owed(source, [owners[nodes[place]] for place in path[1:]])
        self._rest(draft, credit, share, max(map(len, kept)))

    def _score(self, pool: Pool, accepted: dict[int, int], levels: dict[int, int]) -> None:
        found = {source: [False] * count for source, count in levels.items()}
        for guess in pool.proposals:
            parent = pool.parents[guess.node]
            if parent in accepted:
                hit = pool.tokens[guess.node] == accepted[parent]
                depth = pool.depths[guess.node]
                self.learned.calibration.table(self.names[guess.source], depth).learn(guess.score, hit)
                if guess.node in accepted and guess.source in found:
                    found[guess.source][depth - 1] = True
        for source, hits in found.items():
            for depth in range(min(len(hits), len(accepted))):   # whose parents are on the path
                self.learned.expanding[source][depth] += NEW / 2 * (hits[depth] - self.learned.expanding[source][depth])
                if not hits[depth]:
                    break

    def _rest(self, draft: Draft, credit: dict[int, float], share: dict[int, float], size: int) -> None:
        """Note what each source brought and took, of what such a tree adds to a pass too; the worst that does not pay rests."""
        rows, total, rate = len(draft.pools), sum(share.values()), self.learned.rate
        step = self.costs.of_pass(rows, 1)
        extra = self.costs.of_pass(rows, size) - step
        for source, seconds in draft.seconds.items():
            self.learned.source_stats[source].note(credit[source], seconds + (extra * share[source] / total if total else 0.0), rate)
        losses = {source: self.learned.source_stats[source].loss(rate, step) for source in draft.seconds}
        worst = max(losses, key=lambda source: losses[source], default=None)
        if worst is not None and losses[worst] > 0:
            self.learned.source_stats[worst].fail(step, len(losses))
        for source, loss in losses.items():
            if loss < 0:
                self.learned.source_stats[source].prove()


def _owed(source: int, owners: list[set[int]]) -> int:
    """How many accepted nodes would not have been drafted without the source: those from the first that it alone drafted."""
    for i, drafted_by in enumerate(owners):
        if drafted_by == {source}:
            return len(owners) - i
    return 0
