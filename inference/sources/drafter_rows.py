"""A drafter's state for the rows being decoded. Features that the state does not include yet are kept, since steps may not draft.

Shape suffixes: B batch, K depths, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headstart.heads.backbone.features import Features, join_features
from headstart.heads.base import Drafter
from headstart.heads.kv.rows import list_stores, map_stores, pad_rows, padded_rows
from headstart.inference.capture.capture import Capturer
from headstart.inference.engine.tree import graph_size
from headstart.inference.sources.source import Accepted, Source

LAST = 2
"""Minimum number of positions added in the call that drafts: a size of one would be captured apart."""


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

    @property
    def own_cache(self) -> bool:
        """False if it drafts with the backbone's cache."""
        return not self.drafter.uses_backbone_cache

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
        if not self.fixed or not self.own_cache:  # the backbone's cache is there already
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
