"""Anchors: the positions that a drafter drafts from in training, if not from all.

Shape suffixes: B batch, T positions, R anchors of a row, D width, K depth, M anchors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Anchors:
    """One draft per anchor: row m drafts ``x_{t+2}, x_{t+3}, ...`` from ``t = position_M[m]`` of row ``row_M[m]``."""

    row_M: Tensor
    position_M: Tensor


def at_all_positions(tokens_BT: Tensor) -> Anchors:
    """Anchors at all positions, in row-major order."""
    B, T = tokens_BT.shape
    device = tokens_BT.device
    return Anchors(torch.arange(B, device=device).repeat_interleave(T), torch.arange(T, device=device).repeat(B))


def anchors_by_row(at: Anchors, rows: int) -> tuple[Tensor, Tensor]:
    """Return each anchor's index among those of its row, ``[M]``, and the anchors of each row, ``[B, R]``; -2 where a row has fewer."""
    order_M = at.row_M.argsort(stable=True)
    row_M, rank_M = at.row_M[order_M], torch.empty_like(order_M)
    rank_M[order_M] = torch.arange(len(row_M), device=row_M.device) - torch.searchsorted(row_M, row_M)
    average = -(-len(row_M) // rows)  # memory planning knows no values, only shapes
    most = int(rank_M.max().item()) + 1 if len(row_M) else 1
    anchor_BR = rank_M.new_full((rows, max(most, average)), -2)
    anchor_BR[at.row_M, rank_M] = at.position_M
    return rank_M, anchor_BR


def gather_anchors(dense: list[Tensor], at: Anchors) -> list[Tensor]:
    """Select the anchors' rows from dense results: ``[B, max(T-2-k, 0), D]`` per depth -> ``[M, D]``.

    A depth without a result at an anchor takes another position's, which the objective ignores: shapes stay fixed and every depth
    stays in the autograd graph.
    """
    taken = []
    for hidden_BTD in dense:
        if not hidden_BTD.shape[1]:
            hidden_BTD = torch.nn.functional.pad(hidden_BTD, (0, 0, 0, 1))
        taken.append(hidden_BTD[at.row_M, at.position_M.clamp(max=hidden_BTD.shape[1] - 1)])
    return taken


def dense_from_anchors(forward: Callable[[Anchors], list[Tensor]], tokens_BT: Tensor) -> list[Tensor]:
    """Compute dense results ``[B, max(T-2-k, 0), D]`` with a drafter that only drafts from anchors."""
    B, T = tokens_BT.shape
    at_all = forward(at_all_positions(tokens_BT))
    return [hidden_MD.unflatten(0, (B, T))[:, : max(T - 2 - k, 0)] for k, hidden_MD in enumerate(at_all)]
