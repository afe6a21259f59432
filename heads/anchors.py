"""Anchors: the positions a drafter is trained at when it is not trained at all of them.

Shape suffixes: B batch, T positions, D width, K depth, M anchors.
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
    """An anchor at every position, row after row."""
    B, T = tokens_BT.shape
    device = tokens_BT.device
    return Anchors(torch.arange(B, device=device).repeat_interleave(T), torch.arange(T, device=device).repeat(B))


def gather_anchors(dense: list[Tensor], at: Anchors) -> list[Tensor]:
    """Dense results ``[B, max(T-2-k, 0), D]`` of each depth -> ``[M, D]``.

    A depth that has no result at an anchor takes another position's: shapes stay fixed, every depth stays in the autograd graph,
    and the objective does not count it.
    """
    taken = []
    for hidden_BTD in dense:
        if not hidden_BTD.shape[1]:
            hidden_BTD = torch.nn.functional.pad(hidden_BTD, (0, 0, 0, 1))
        taken.append(hidden_BTD[at.row_M, at.position_M.clamp(max=hidden_BTD.shape[1] - 1)])
    return taken


def dense_from_anchors(forward: Callable[[Anchors], list[Tensor]], tokens_BT: Tensor) -> list[Tensor]:
    """Dense results ``[B, max(T-2-k, 0), D]`` of a drafter that knows only how to draft from anchors."""
    B, T = tokens_BT.shape
    at_all = forward(at_all_positions(tokens_BT))
    return [hidden_MD.unflatten(0, (B, T))[:, : max(T - 2 - k, 0)] for k, hidden_MD in enumerate(at_all)]
