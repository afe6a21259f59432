"""A whole causal model with its own KV cache, as draft models use it in decoding.

The nodes of a tree are read level by level, with their keys stored after each row's end. Newly accepted tokens are kept until the next
draft, which processes them and the root in one forward pass.

Shape suffixes: B batch, T positions, N nodes of this pass, M nodes so far (the N included), K root and masks, S slots, D width.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.features import pick
from headstart.heads.layers.ragged_cache import RaggedCache, Stores, TreeCache, extend_ancestors, masks_by_kind
from headstart.heads.layers.rows import RowState, drafted


@dataclass(frozen=True)
class Rows(RowState):
    """Keys and values of each row's ``lengths_B`` tokens, and of the nodes drafted after them."""

    stored = ("stores",)

    stores: Stores
    lengths_B: Tensor
    ancestors_BNM: Tensor | None = drafted()
    """The ancestors of the last level's nodes among all drafted nodes; None before the first level."""
    levels_M: Tensor | None = drafted()
    """The level of each node processed so far; 0 for the root."""


def read_level(model: Backbone, view: TreeCache, rows: Rows, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, Rows]:
    """Hidden states ``[B, N, D]`` of the nodes of one level, and the rows extended by them; ``view`` presents the stores to the model."""
    N = tokens_BN.shape[1]
    ancestors_BNM = extend_ancestors(rows.ancestors_BNM if depth else None, parents_BN)
    levels_M = torch.full((N,), depth, device=tokens_BN.device)
    if depth:
        assert rows.levels_M is not None
        levels_M = torch.cat([rows.levels_M, levels_M])
    return read_behind(model, view, Rows(rows.stores, rows.lengths_B, ancestors_BNM, levels_M), tokens_BN)


def read_chain(model: Backbone, view: TreeCache, rows: Rows, tokens_BT: Tensor) -> tuple[Tensor, Rows]:
    """Hidden states ``[B, T, D]`` of tokens that continue the rows, and the rows with their keys; ``lengths_B`` is unchanged.

    The slots of padding after a row's new tokens are overwritten later.
    """
    B, T = tokens_BT.shape
    before_BTT = torch.ones(T, T, dtype=torch.bool, device=tokens_BT.device).tril().expand(B, T, T)
    chain = Rows(rows.stores, rows.lengths_B, before_BTT, torch.arange(T, device=tokens_BT.device))
    hidden_BTD, chain = read_behind(model, view, chain, tokens_BT)
    return hidden_BTD, Rows(chain.stores, rows.lengths_B)


def read_behind(model: Backbone, view: TreeCache, rows: Rows, tokens_BN: Tensor) -> tuple[Tensor, Rows]:
    """Hidden states of the last N of the rows' M nodes, whose keys are stored after those of the others; and the rows with these keys."""
    ancestors_BNM, levels_M, lengths_B = rows.ancestors_BNM, rows.levels_M, rows.lengths_B
    assert ancestors_BNM is not None and levels_M is not None
    N, M = ancestors_BNM.shape[1:]
    slots = rows.stores[0][0].shape[-2]
    # Padding may lie beyond the last slot or the model's last position; any slot and position will do for it.
    index_BN = (lengths_B[:, None] + torch.arange(M - N, M, device=lengths_B.device)).clamp(max=slots - 1)
    positions_BM = lengths_B[:, None] + levels_M
    positions_BN = positions_BM[:, M - N :]
    attention_mask = masks_by_kind(positions_BN, positions_BM, ancestors_BNM, lengths_B, slots, model.windows)
    if model.max_positions is not None:
        positions_BN = positions_BN.clamp(max=model.max_positions - 1)
    hidden_BND = model.read(tokens_BN, view.over(rows.stores, index_BN), positions_BN, attention_mask).hidden_BTD
    return hidden_BND, replace(rows, stores=view.written())


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
        cache = DynamicCache()  # without the model's configuration, sliding-window layers keep all keys
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
