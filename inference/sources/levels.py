"""A causal model that drafts: it reads the nodes of a tree level by level, their keys behind each row's end.

Shape suffixes: L layers, B batch, H heads, N nodes read now, M nodes read so far (these among them), S slots, C head width, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.layers.tree_mask import extend_ancestors, masks_by_kind
from headstart.inference.engine.cache import Stores, TreeCache


@dataclass(frozen=True)
class Rows:
    """What a model has read: ``lengths_B`` tokens of each row, and the nodes drafted behind them."""

    stores: Stores
    lengths_B: Tensor
    ancestors_BNM: Tensor | None = None
    """Of the last level's nodes among all nodes read; None before the first level."""
    depths_M: Tensor | None = None
    """How far below the root each node read lies."""


def read_level(model: Backbone, view: TreeCache, rows: Rows, tokens_BN: Tensor, parents_BN: Tensor, depth: int) -> tuple[Tensor, Rows]:
    """Hidden states ``[B, N, D]`` of the nodes of one depth, and the rows that know them; ``view`` shows the stores to the model."""
    N = tokens_BN.shape[1]
    ancestors_BNM = extend_ancestors(rows.ancestors_BNM if depth else None, parents_BN)
    depths_M = torch.full((N,), depth, device=tokens_BN.device)
    if depth:
        assert rows.depths_M is not None
        depths_M = torch.cat([rows.depths_M, depths_M])
    return read_behind(model, view, Rows(rows.stores, rows.lengths_B, ancestors_BNM, depths_M), tokens_BN)


def read_chain(model: Backbone, view: TreeCache, rows: Rows, tokens_BT: Tensor) -> Tensor:
    """Hidden states ``[B, T, D]`` of text that goes on where the rows end; what lies past a row's own new tokens is overwritten later."""
    B, T = tokens_BT.shape
    before_BTT = torch.ones(T, T, dtype=torch.bool, device=tokens_BT.device).tril().expand(B, T, T)
    chain = Rows(rows.stores, rows.lengths_B, before_BTT, torch.arange(T, device=tokens_BT.device))
    return read_behind(model, view, chain, tokens_BT)[0]


def read_behind(model: Backbone, view: TreeCache, rows: Rows, tokens_BN: Tensor) -> tuple[Tensor, Rows]:
    """Hidden states of the last N of the rows' M nodes, whose keys go into the slots behind those of the others; and the rows."""
    ancestors_BNM, depths_M, lengths_B = rows.ancestors_BNM, rows.depths_M, rows.lengths_B
    assert ancestors_BNM is not None and depths_M is not None
    N, M = ancestors_BNM.shape[1:]
    slots = rows.stores[0][0].shape[-2]
    # Padding may lie past the last slot, or past the last position that the model knows: any will do for it.
    index_BN = (lengths_B[:, None] + torch.arange(N, device=lengths_B.device) + (M - N)).clamp(max=slots - 1)
    positions_BM = lengths_B[:, None] + depths_M
    positions_BN = positions_BM[:, M - N :]
    attention_mask = masks_by_kind(positions_BN, positions_BM, ancestors_BNM, lengths_B, slots, model.windows)
    if model.max_positions is not None:
        positions_BN = positions_BN.clamp(max=model.max_positions - 1)
    tokens_BN = tokens_BN.clamp(max=model.vocab - 1)
    return model.read(tokens_BN, view.over(rows.stores, index_BN), positions_BN, attention_mask).hidden_BTD, rows
