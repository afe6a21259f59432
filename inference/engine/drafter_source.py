"""A drafter as a source: it drafts the levels of a beam, expanding the most likely nodes of the level before.

All depths are one captured call, after which the host reads the nodes once; on a CPU, where calls cost more than captures of further
sizes, the same call extends the state by the tokens accepted last. Features that the state does not include yet are kept, since steps may
not draft.

Shape suffixes: B batch, W beam width, D width, K depths, V draft vocabulary.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features, join_features
from headstart.heads.base import Drafter
from headstart.heads.layers.ragged_cache import RaggedCache
from headstart.heads.layers.rows import list_stores, map_stores, pad_rows, padded_rows
from headstart.inference.capture.capture import Capturer
from headstart.inference.capture.captured import Captured
from headstart.inference.engine.source import Accepted, DraftScoring, Level, Nodes, Progress, Rows, Source, draft_levels, unpacked
from headstart.inference.engine.tree import BEAM_WIDTH, CPU_WIDTH, Pool, TreeShape, graph_size
from headstart.support.pytree import map_tensors

LAST, MOST = 2, 8
"""The fewest and the most positions added in the call that drafts: a size of one would be captured apart, and many would take long."""


class DrafterRows(Source):
    """The rows in a drafter's state; in fixed memory copies of the last row pad them (`padded_rows`)."""

    def __init__(self, name: str, drafter: Drafter, capturer: Capturer) -> None:
        super().__init__(name, drafter.depth)
        self.drafter, self.device, self.capturer = drafter, drafter.backbone.device, capturer
        self.fixed = capturer.fixed
        """Stores lie in fixed memory, and sizes are padded."""
        extend = lambda state, features: drafter.begin(features, state)  # noqa: E731
        self._extend = capturer.capture(extend, "drafter prefill", drafter, not_capturable(drafter))
        self._clear()

    def _clear(self) -> None:
        self.state: Any = None
        self._hidden_BKD: Tensor | None = None
        """The current draft's hidden states of a drafter that gives all depths at once."""
        self._count = 0
        """The number of rows being decoded."""
        self._pending: list[Features] = []
        """Features that the state does not include yet."""
        self._shortest = 0
        """A lower bound of the shortest prompt's length."""
        self._positions = 0
        """An upper bound of the longest row's length: rows are padded to one length at every step."""

    def start(self, sampled: bool) -> None:
        super().start(sampled)
        self.fixed = self.capturer.fixed
        self._clear()

    def join(self, sequences: list[int], tokens: list[list[int]], features: Features) -> None:
        new, positions = features.tokens_BT.shape
        if self.state is None and not self._pending:
            self._pending, self._positions, self._count = [features], positions, new
            self._shortest = min(map(len, tokens), default=0) - 1
            return
        self.catch_up(self._positions)
        state = self.drafter.select(self.state, torch.arange(self._count, device=self.device)) if self._padded else self.state
        self.state = self.drafter.join(state, self._extended(None, features, positions))
        self._positions, self._count = max(self._positions, positions), self._count + new
        if self._padded:
            self.state = self.drafter.select(self.state, self._index([*range(self._count)]))

    def extend(self, accepted: Accepted) -> None:
        self.append(accepted.features)

    def append(self, features: Features) -> None:
        """Add the features of each row's next tokens, right-padded."""
        self._pending.append(features)
        self._positions += features.tokens_BT.shape[1]

    def select(self, rows: list[int]) -> None:
        if not rows:
            self._clear()
            return
        if self._pending:
            self._pending = [join_features(self._pending).rows(torch.tensor(rows, device=self.device))]
        if self.state is not None:
            self.state = self.drafter.select(self.state, self._index(rows))
        self._count = len(rows)

    def catch_up(self, length: int) -> None:
        """Add the pending features to the state; ``length``: positions it must have room for, drafted nodes included."""
        if self._pending:
            features = self._joined()
            if self.fixed and self.state is not None:
                features = features.padded(graph_size(features.tokens_BT.shape[1]))
                length += features.tokens_BT.shape[1]
            self.state, self._pending = self._extended(self.state, features, length), []

    def _leave(self, left: int, length: int) -> None:
        """Extend the state by the pending features except their last ``left`` positions, which the call that drafts adds."""
        if not self._pending or (self.state is None and self._shortest <= left):
            return
        last = self._joined(left)
        if last.tokens_BT.shape[1] > left:
            first, last = last.split(left)
            self.state = self._extended(self.state, first, length)
        self._pending = [last]

    def _joined(self, least: int = LAST) -> Features:
        """The pending features, of at least so many positions."""
        joined = join_features(self._pending)
        return (joined.rows(self._index([*range(self._count)])) if self._padded else joined).padded(least)

    def _index(self, rows: list[int]) -> Tensor:
        """These rows as a tensor, in fixed memory padded with the last one."""
        index_B = torch.tensor(rows, device=self.device)
        return pad_rows(index_B, padded_rows(len(rows))) if self.fixed else index_B

    @property
    def _padded(self) -> bool:
        """True if the state has more rows than are being decoded."""
        return self.fixed and padded_rows(self._count) > self._count

    def _extended(self, state: Any, features: Features, length: int) -> Any:
        if state is None:
            return self.drafter.reserve(self.drafter.begin(features), length)
        return self._extend(self._placed(self.drafter.reserve(state, length)), features)

    def _placed(self, state: Any) -> Any:
        """The state, whose stores are in fixed memory if there is one."""
        if not self.fixed or self.drafter.uses_backbone_cache:  # which is there already
            return state
        placed = iter(self.capturer.memory.place(self.name, list_stores(state)))
        return map_stores(lambda _: next(placed), state)


def not_capturable(drafter: Drafter) -> str | None:
    """The reason why the drafter's steps are not captured; None if they are."""
    if not drafter.capturable:
        return f"{type(drafter).__name__} is not capturable"
    if any(weight.requires_grad for weight in drafter.parameters()):  # a capture would not see weight updates
        return "its weights are being trained"
    return None


MIN_SCORE = -1e9
"""Nodes with a lower score, as from diverged heads, are dropped."""


class DrafterSource(DrafterRows):
    """A drafter that drafts for the rows being decoded."""

    first_cost = 0.06

    def __init__(self, name: str, drafter: Drafter, capturer: Capturer) -> None:
        super().__init__(name, drafter, capturer)
        unless, function = not_capturable(drafter), partial(draft_levels, drafter)
        compilable = None if drafter.uses_backbone_cache else function
        self._step = capturer.capture(function, "draft level", drafter, unless, calls_per_step=drafter.depth)
        self._steps = capturer.capture(function, "drafts", drafter, unless, compilable=compilable)
        self._round = capturer.capture(function, "drafting", drafter, unless, compilable=compilable)
        self._compiled = False
        """Whether a draft was made by compiled code."""
        self.in_one_call = not (capturer.accelerator or drafter.uses_backbone_cache)
        """Extend the state in the call that drafts the first levels."""

    @property
    def captured(self) -> bool:
        """True once draft steps are captured; their times are then kept separately, since they are faster."""
        return bool(self._step.captures_made or self._steps.captures_made or self._round.captures_made)

    def depth_of(self, shape: TreeShape | None) -> int:
        """The maximum number of depths to draft: the drafter's, or that of a tree of this shape."""
        if shape is None or shape.depth is None:
            return self.depth
        return min(shape.depth, max(self.depth, shape.nodes - 1))  # a tree has fewer levels below its root than nodes

    @property
    def counts(self) -> list[int]:
        deepest = self.depth if self.fixed else self.drafter.deepest
        return sorted({1 << power for power in range(self.depth.bit_length() - 1)} | {self.depth, deepest})  # few: each is captured apart

    def prepare(self, longest: int, width: int, cache: RaggedCache | None, depth: int | None = None) -> None:
        """Prepare the state for a draft after at most ``longest`` tokens. ``cache``: the backbone's; None: not needed by the drafter."""
        nodes = _room(depth or self.depth, width)
        self.catch_up(longest + nodes)
        if cache is None:
            state = self.drafter.reserve(self.state, longest + nodes)
        else:
            state = self.drafter.prepare_draft(self.state, cache, nodes)
        self.state = self._placed(state)

    # Drafting.

    def keep_up(self, rows: Rows) -> None:
        behind = self.state is None or sum(features.tokens_BT.shape[1] for features in self._pending) > MOST
        if rows.cache is not None and self.in_one_call and behind:
            self._leave(LAST, rows.cache.longest)

    def draft(self, rows: Rows, pools: Sequence[Pool], depths: int) -> None:
        if rows.cache is not None:
            longest, depth = rows.cache.longest, max(self.depth_of(rows.shape), depths)
            if self.in_one_call and self.state is not None:
                self.state = self.drafter.reserve(self.state, longest + _room(depth, self._width(rows)))
            else:
                self.prepare(longest, self._width(rows), rows.cache, depth)
        levels, packed_BX = self._drafted(self._steps, range(depths), self.roots(rows.roots), self._width(rows), rows.scoring(depths))
        above = [[0] for _ in pools]
        for depth, nodes in enumerate(unpacked(packed_BX, levels)):
            above = self._attach(rows, pools, nodes, above, depth)

    def fixed_depths(self, shape: TreeShape, remaining: int) -> int:
        limit = min(self.depth_of(shape), remaining)
        few = [count for count in self.counts if limit <= count <= self.depth_of(shape)]
        return few[0] if few and limit > 0 and self.fixed else limit  # the last ones may not fit in the text

    def _width(self, rows: Rows) -> int:
        return self.width(len(rows.roots)) if rows.shape is None else rows.shape.width

    def width(self, rows: int) -> int:
        """The beam width of adaptive trees. On a CPU every node takes time: narrow beams for one row, chains for several."""
        if self.drafter.backbone.no_trees is not None:
            return 1
        if self.capturer.accelerator:
            return BEAM_WIDTH
        return 1 if rows > 1 else CPU_WIDTH

    def roots(self, roots: list[int]) -> Level:
        """The roots as the level before depth 0."""
        roots_B1 = torch.tensor([[root] for root in roots], device=self.device)
        zeros_B1 = torch.zeros_like(roots_B1, dtype=torch.float32)
        return Level(roots_B1, torch.zeros_like(roots_B1), zeros_B1, zeros_B1)

    def step(self, depth: int, before: Level, width: int, scoring: DraftScoring) -> Level:
        """The ``width`` most likely nodes of that depth."""
        return self._drafted(self._step, range(depth, depth + 1), before, width, scoring)[0][0]

    def _drafted(self, draft: Captured, depths: range, before: Level, width: int, scoring: DraftScoring) -> tuple[list[Level], Tensor]:
        """Draft consecutive depths in one call: returns their levels, and the numbers of their nodes for `unpacked`."""
        progress = Progress(self.state, self._hidden_BKD, depths.start, len(depths))
        scoring, rows = scoring.at(depths, self.drafter.vocabulary), len(before.tokens_BW)
        if self.fixed:
            before = map_tensors(lambda value_B: pad_rows(value_B, padded_rows(rows)), before)
            if scoring.noise_BPV is not None:
                scoring = replace(scoring, noise_BPV=pad_rows(scoring.noise_BPV, padded_rows(rows)))
        features, function = (self._joined(), self._round) if self._pending else (None, draft)
        levels, packed_BX, self.state, self._hidden_BKD = function(progress, features, before, width, scoring)
        self._compiled = self._compiled or function.last_compiled
        self._pending = []
        return map_tensors(lambda value_B: value_B[:rows], (levels, packed_BX)) if self.fixed else (levels, packed_BX)

    def timed_as(self, rows: int, depths: int) -> tuple[Hashable, int]:
        made = "compiled" if self._compiled else "captured" if self.captured else ""
        return (self.name, made, self.sampled), depths  # sampling has noise to add and wider beams

    def _attach(self, rows: Rows, pools: Sequence[Pool], level: Nodes, above: list[list[int]], depth: int) -> list[list[int]]:
        """Add the level to the pools; returns the nodes' numbers there (-1: not added, too deep for the row or too low a score)."""
        drafted, attached = zip(level.tokens, level.parents, level.scores, strict=True), []
        for row, (parent_nodes, (tokens, parents, scores)) in enumerate(zip(above, drafted, strict=True)):
            pool, remaining, nodes = pools[row], rows.remaining[row], list[int]()
            for token, parent, score in zip(tokens, parents, scores, strict=True):
                node = parent_nodes[parent]
                if node < 0 or depth >= remaining or not score > MIN_SCORE:
                    nodes.append(-1)
                else:
                    nodes.append(pool.add(self, node, token, score, self.prob(rows, row, depth, score)))
            attached.append(nodes)
        return attached


def _room(depth: int, width: int) -> int:
    """Positions to reserve for the nodes of a draft."""
    return (depth + 1) * (width + 1)
