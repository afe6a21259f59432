"""Runs a causal model over the nodes of a tree level by level, with their keys stored after each row's end.

Shape suffixes: L layers, B batch, H heads, N nodes of this pass, M nodes so far (the N included), S slots, C head width, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.layers.ragged import grown, join_rows, select_rows
from headstart.heads.layers.ragged_cache import Stores, TreeCache
from headstart.heads.layers.row_state import RowState, drafted
from headstart.heads.layers.tree_mask import extend_ancestors, masks_by_kind


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

    def reserve(self, length: int) -> Rows:
        keys, values = (tuple(grown(store, length) for store in stores) for stores in self.stores)
        return Rows((keys, values), self.lengths_B)

    def select(self, rows_B: Tensor) -> Rows:
        keys, values = (tuple(select_rows(store, rows_B) for store in stores) for stores in self.stores)
        return Rows((keys, values), self.lengths_B[rows_B])

    def join(self, other: Rows) -> Rows:
        pairs = zip(self.stores, other.stores, strict=True)
        keys, values = (tuple(join_rows(*pair) for pair in zip(*stores, strict=True)) for stores in pairs)
        return Rows((keys, values), torch.cat([self.lengths_B, other.lengths_B]))


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
