"""A drafter as a source: it drafts the levels of a beam, expanding the most likely nodes of the level before.

All depths are one captured call, after which the host reads the nodes once; on a CPU, where calls cost more than captures of further
sizes, the same call extends the state by the tokens accepted last. With adaptive trees the number of depths follows from what deeper
levels brought in earlier steps and from what proposers have drafted.

Shape suffixes: B batch, W beam width, D width, K depths, V draft vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features, join_features
from headstart.heads.base import Drafter
from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.inference.capture.capture import Captured, Capturer
from headstart.inference.capture.stopwatch import Stopwatch
from headstart.inference.engine.cost_model import MIN_TIMES
from headstart.inference.engine.sizes import BEAM_WIDTH, CPU_GREEDY_WIDTH, CPU_SAMPLED_WIDTH
from headstart.inference.engine.tree import TreeShape
from headstart.inference.sources.depth_choice import DepthChoice, note_masses
from headstart.inference.sources.draft import Draft, DraftScoring
from headstart.inference.sources.levels import Level, Nodes, Progress, draft_levels, extend_and_draft, unpacked
from headstart.inference.sources.source import Accepted, Source

MAX_PENDING = 8
"""Maximum number of steps whose features are kept separately; when rows are selected, more are joined into one."""
LAST = 2
"""Minimum number of positions added in the call that drafts: a size of one would be captured apart."""
MIN_SCORE = -1e9
"""Nodes with a lower score, as from diverged heads, are dropped."""


class DrafterSource(Source):
    """A drafter with its state for the rows being decoded; features that the state does not include yet are kept in ``_pending``."""

    def __init__(self, name: str, drafter: Drafter, capturer: Capturer) -> None:
        super().__init__(name, drafter.depth)
        self.drafter, self.device = drafter, drafter.backbone.device
        unless = _not_capturable(drafter)
        extend = lambda state, features: drafter.begin(features, state)   # noqa: E731
        self._extend = capturer.capture(extend, "drafter prefill", drafter, unless, every_step=False)
        self._step = capturer.capture(partial(draft_levels, drafter), "draft level", drafter, unless, calls_per_step=drafter.depth)
        self._steps = capturer.capture(partial(draft_levels, drafter), "drafts", drafter, unless)
        self._round = capturer.capture(partial(extend_and_draft, drafter), "drafting", drafter, unless)
        self.in_one_call = self.device.type == "cpu" and not drafter.uses_backbone_cache
        """Extend the state in the call that drafts the first levels."""
        self.few_sizes = capturer.slow
        """Each size takes long to capture."""
        self.choice = DepthChoice(self.depth, drafter.deepest, few=self.few_sizes)
        self._clear()

    @property
    def captured(self) -> bool:
        """True once draft steps are captured; their times are then kept separately, since they are faster."""
        return bool(self._step.captures_made or self._steps.captures_made or self._round.captures_made)

    @property
    def calls(self) -> int:
        """The number of calls in which levels were drafted so far."""
        return self._step.calls + self._steps.calls + self._round.calls

    @property
    def own_cache(self) -> bool:
        """False if it drafts with the backbone's cache."""
        return not self.drafter.uses_backbone_cache

    # The rows being decoded.

    def _clear(self) -> None:
        self.state: Any = None
        self._hidden_BKD: Tensor | None = None
        """The current draft's hidden states of a drafter that gives all depths at once."""
        self._rows: list[int] | None = None
        """For each row being decoded, its row in the state; None: the same index."""
        self._pending: list[tuple[Features, list[int] | None]] = []
        """Features that the state does not include yet; for each, the row of every row being decoded (None: the same index)."""
        self._shortest = 0
        """A lower bound of the shortest prompt's length."""
        self._positions = 0
        """An upper bound of the longest row's length: rows are padded to one length at every step."""

    def start(self, sampled: bool) -> None:
        super().start(sampled)
        self._clear()

    def join(self, sequences: list[int], tokens: list[list[int]], features: Features) -> None:
        positions = features.tokens_BT.shape[1]
        if self.state is None and not self._pending:
            self._pending, self._positions = [(features, None)], positions
            self._shortest = min(map(len, tokens), default=0) - 1
            return
        self.catch_up(self._positions)
        self.state = self.drafter.join(self.state, self._extended(None, features, positions))
        self._positions = max(self._positions, positions)

    def extend(self, accepted: Accepted) -> None:
        self.append(accepted.features)

    def append(self, features: Features) -> None:
        """Add the features of each row's next tokens, right-padded."""
        self._pending.append((features, None))
        self._positions += features.tokens_BT.shape[1]

    def select(self, rows: list[int]) -> None:
        if not rows:
            self._clear()
            return
        self._rows = _selected(self._rows, rows)
        self._pending = [(features, _selected(old, rows)) for features, old in self._pending]
        if len(self._pending) > MAX_PENDING:
            self._pending = [(self._joined(), None)]

    def catch_up(self, length: int) -> None:
        """Apply row selections and pending features to the state; ``length``: positions it must have room for, drafted nodes included."""
        self._select_rows()
        if self._pending:
            self.state = self._extended(self.state, self._joined(), length)
        self._pending = []

    def _select_rows(self) -> None:
        """Apply row selections to the state and to the pending features."""
        if self._rows is not None and self.state is not None:
            self.state = self.drafter.select(self.state, torch.tensor(self._rows, device=self.device))
        if len(self._pending) > 1 or (self._pending and self._pending[0][1] is not None):
            self._pending = [(self._joined(), None)]
        self._rows = None

    def _leave(self, left: int, length: int) -> None:
        """Extend the state by the pending features except their last ``left`` positions, which the call that drafts adds."""
        if not self._pending or (self.state is None and self._shortest <= left):
            return
        last = self._joined(left)
        if last.tokens_BT.shape[1] > left:
            first, last = last.split(left)
            self.state = self._extended(self.state, first, length)
        self._pending = [(last, None)]

    def _joined(self, least: int = LAST) -> Features:
        """The pending features, of at least so many positions."""
        parts = [part if rows is None else part.rows(torch.tensor(rows, device=self.device)) for part, rows in self._pending]
        return join_features(parts).padded(least)

    def _extended(self, state: Any, features: Features, length: int) -> Any:
        if state is None:
            return self.drafter.reserve(self.drafter.begin(features), length)
        return self._extend(self.drafter.reserve(state, length), features)

    def depth_of(self, shape: TreeShape | None) -> int:
        """The maximum number of depths to draft: the drafter's, or that of a tree of this shape."""
        if shape is None or shape.depth is None:
            return self.depth
        return min(shape.depth, max(self.depth, shape.nodes - 1))   # a tree has fewer levels below its root than nodes

    def limit_of(self, shape: TreeShape | None) -> int:
        """The same, where adaptive trees may have further depths than the drafter's."""
        return self.learned.limit if shape is None else self.depth_of(shape)

    def noise_depths(self, shape: TreeShape | None) -> int:
        return self.limit_of(shape)

    def prepare(self, longest: int, width: int, cache: RaggedCache | None, depth: int | None = None) -> None:
        """Prepare the state for a draft after at most ``longest`` tokens. ``cache``: the backbone's; None: not needed by the drafter."""
        nodes = _room(depth or self.depth, width)
        self.catch_up(longest + nodes)
        if cache is None:
            self.state = self.drafter.reserve(self.state, longest + nodes)
        else:
            self.state = self.drafter.prepare_draft(self.state, cache, nodes)

    # Drafting.

    def draft(self, draft: Draft) -> None:
        assert draft.cache is not None
        depths = self.depths(draft)
        if not depths:
            return
        with Stopwatch() as watch:
            longest, depth = draft.cache.longest, self.limit_of(draft.shape)
            if self.in_one_call:
                self._select_rows()
                if self.few_sizes and len(draft.pools) > 1:
                    self._leave(1 + self.depth_of(draft.shape), longest)
                elif self.state is None:
                    self._leave(LAST, longest)
            if self.in_one_call and self.state is not None:
                self.state = self.drafter.reserve(self.state, longest + _room(depth, self._width(draft)))
            else:
                self.prepare(longest, self._width(draft), draft.cache, depth)
            self.grow(draft, depths)
        draft.seconds[self] = watch.seconds

    def depths(self, draft: Draft) -> range:
        """The depths to draft: those of the tree's shape or, with adaptive trees, those that make decoding faster."""
        limit = min(self.limit_of(draft.shape), max([0, *draft.remaining]))
        if draft.shape is not None:
            return range(limit)

        def seconds(depths: int) -> float:
            # One slow draft of a further depth would put it off for good.
            return draft.costs.part(self.part(depths), len(draft.pools), 1 if depths <= self.depth else MIN_TIMES)

        return range(self.choice.best(draft, self.learned, limit, seconds))

    def grow(self, draft: Draft, depths: range) -> None:
        """Draft these depths, from 0 on; the state is prepared."""
        roots = self.roots([pool.tokens[0] for pool in draft.pools])
        with Stopwatch() as watch:
            levels, packed_BX = self._drafted(self._steps, depths, roots, self._width(draft), draft.scoring)
            added = [[[0] for _ in draft.pools]]
            for depth, nodes in enumerate(unpacked(packed_BX, levels)):
                added.append(self._attach(draft, nodes, added[-1], depth))
        draft.depths[self] = len(depths)
        if watch.valid:
            draft.costs.add(self.part(len(depths)), len(draft.pools), watch.seconds)
        if draft.shape is None:
            note_masses(self.learned, draft, added[1:])

    def _width(self, draft: Draft) -> int:
        return self.width(len(draft.pools)) if draft.shape is None else draft.shape.width

    def width(self, rows: int) -> int:
        """The beam width of adaptive trees. On a CPU every node takes time: narrow beams for one row, chains for several."""
        if self.device.type != "cpu":
            return BEAM_WIDTH
        if rows > 1:
            return 1
        return CPU_SAMPLED_WIDTH if self.sampled else CPU_GREEDY_WIDTH

    def roots(self, roots: list[int]) -> Level:
        """The roots as the level before depth 0."""
        roots_B1 = torch.tensor(roots, device=self.device)[:, None]
        zeros_B1 = torch.zeros(roots_B1.shape, dtype=torch.float32, device=self.device)
        return Level(roots_B1, torch.zeros_like(roots_B1), zeros_B1, zeros_B1)

    def step(self, depth: int, before: Level, width: int, scoring: DraftScoring) -> Level:
        """The ``width`` most likely nodes of that depth."""
        return self._drafted(self._step, range(depth, depth + 1), before, width, scoring)[0][0]

    def _drafted(self, draft: Captured, depths: range, before: Level, width: int, scoring: DraftScoring) -> tuple[list[Level], Tensor]:
        """Draft consecutive depths in one call: returns their levels, and the numbers of their nodes for `unpacked`."""
        progress = Progress(self.state, self._hidden_BKD, depths.start, len(depths))
        scoring = scoring.at(depths, self.drafter.vocabulary)
        if self._pending:
            drafted = self._round(progress, self._joined(), before, width, scoring)
        else:
            drafted = draft(progress, before, width, scoring)
        levels, packed_BX, self.state, self._hidden_BKD = drafted
        self._pending = []
        return levels, packed_BX

    def part(self, depths: int) -> tuple[str, int, bool, bool]:
        """The key of the costs of drafting that many depths in the cost model; sampling has noise to add and wider beams."""
        return self.name, depths, self.captured, self.sampled

    def _attach(self, draft: Draft, level: Nodes, above: list[list[int]], depth: int) -> list[list[int]]:
        """Add the level to the pools; returns the nodes' numbers there (-1: not added, too deep for the row or too low a score)."""
        rows = zip(level.tokens, level.parents, level.scores, strict=True)
        attached = []
        for pool, remaining, parent_nodes, (tokens, parents, scores) in zip(draft.pools, draft.remaining, above, rows, strict=True):
            nodes = []
            for token, parent, score in zip(tokens, parents, scores, strict=True):
                node = parent_nodes[parent]
                if node < 0 or depth >= remaining or not score > MIN_SCORE:
                    nodes.append(-1)
                else:
                    nodes.append(pool.add(self, node, token, score, self.prob(draft, depth, score)))
            attached.append(nodes)
        return attached


def _room(depth: int, width: int) -> int:
    """Positions to reserve for the nodes of a draft."""
    return (depth + 1) * (width + 1)


def _not_capturable(drafter: Drafter) -> str | None:
    """The reason why the drafter's steps are not captured; None if they are."""
    if not drafter.capturable:
        return f"{type(drafter).__name__} is not capturable"
    if any(weight.requires_grad for weight in drafter.parameters()):   # a capture would not see weight updates
        return "its weights are being trained"
    return None


def _selected(before: list[int] | None, rows: list[int]) -> list[int]:
    return list(rows) if before is None else [before[row] for row in rows]
