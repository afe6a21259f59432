"""A whole causal model with its own KV cache, as draft models use it in decoding.

Newly accepted tokens are kept until the next draft, which processes them and the root in one forward pass.

Shape suffixes: B batch, T positions, N tree nodes, K root and masks, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import pick
from headstart.heads.layers.levels import Rows, read_chain, read_level
from headstart.heads.layers.ragged_cache import RaggedCache, TreeCache
from headstart.heads.layers.row_state import RowState


@dataclass(frozen=True)
class State(RowState):
    """The rows in the model's cache, and accepted tokens that it has not processed yet."""

    rows: Rows
    waiting_BT: Tensor | None = None
    """Accepted tokens to process, right-padded."""
    counts_B: Tensor | None = None
    """The number of waiting tokens of each row."""


class CachedModel:
    """A model used with a KV cache of rows; the keys themselves are in the state."""

    def __init__(self, model: Backbone) -> None:
        self.model = model
        self.view: TreeCache | None = None

    def begin(self, tokens_BT: Tensor, lengths_B: Tensor, state: State | None) -> State:
        """Extend the state (None: start new rows) by accepted tokens, right-padded."""
        if state is None:
            return State(self._prompts(tokens_BT, lengths_B))
        return State(self._settle(state), tokens_BT, lengths_B)

    def join(self, state: State, other: State) -> State:
        """Append the rows of another state."""
        return State(self._settle(state).join(self._settle(other)))

    def nodes(self, state: State, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, State]:
        """Return the hidden states ``[B, N, D]`` of the nodes of a depth below the roots, and the state with them."""
        assert self.view is not None
        hidden_BND, rows = read_level(self.model, self.view, state.rows, tokens_BN, parents_BN, depth)
        return hidden_BND, State(rows)

    def roots(self, state: State, roots_B1: Tensor, mask: int, masks: int) -> tuple[Tensor, State]:
        """Return the hidden states ``[B, K, D]`` of the roots and of ``masks`` tokens ``mask`` after each, and the state with the roots.

        A row's waiting tokens, its root and the masks after it are one chain.
        """
        assert self.view is not None
        waiting_BT, counts_B = state.waiting_BT, state.counts_B
        if waiting_BT is None or counts_B is None:
            waiting_BT, counts_B = roots_B1[:, :0], torch.zeros_like(state.rows.lengths_B)
        counts_B1, device = counts_B[:, None], roots_B1.device
        tokens_BT = F.pad(waiting_BT, (0, 1 + masks), value=mask)
        tokens_BT = tokens_BT.masked_fill(torch.arange(tokens_BT.shape[1], device=device) > counts_B1, mask)
        hidden_BTD, rows = read_chain(self.model, self.view, state.rows, tokens_BT.scatter(1, counts_B1, roots_B1))
        index_BK = counts_B1 + torch.arange(1 + masks, device=device)
        hidden_BKD = pick(hidden_BTD, index_BK)
        itself_B11 = torch.ones_like(counts_B1, dtype=torch.bool)[..., None]
        depths_1 = torch.zeros(1, dtype=torch.int64, device=device)
        return hidden_BKD, State(Rows(rows.stores, rows.lengths_B + counts_B, itself_B11, depths_1))

    def _prompts(self, tokens_BT: Tensor, lengths_B: Tensor) -> Rows:
        """Prefill new rows, right-padded."""
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        if self.model.max_positions is not None:
            places_T = places_T.clamp(max=self.model.max_positions - 1)
        cache = DynamicCache()   # without the model's configuration, sliding-window layers keep all keys
        self.model.read(tokens_BT, cache, places_T.expand_as(tokens_BT))
        ragged = RaggedCache([(layer.keys, layer.values) for layer in cache.layers], lengths_B)
        if self.view is None:
            self.view = TreeCache(ragged.groups)
        return Rows((ragged.keys, ragged.values), lengths_B)

    def _settle(self, state: State) -> Rows:
        """Process the waiting tokens; returns the extended rows."""
        rows = Rows(state.rows.stores, state.rows.lengths_B)
        if state.waiting_BT is None or state.counts_B is None:
            return rows
        assert self.view is not None
        _, rows = read_chain(self.model, self.view, rows, state.waiting_BT)
        return replace(rows, lengths_B=rows.lengths_B + state.counts_B)
