"""Ancestor relations in a candidate tree, and the attention masks that follow from them.

Row b has its past in slots ``0 .. length_b - 1`` and node m of its tree in slot ``length_b + m``. A node attends to its row's past,
its ancestors and itself. The tensor functions copy nothing to the host and branch on shapes only, so that they can be captured.

Shape suffixes: B batch, N nodes (the last of the M), M nodes, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def ancestors_from_parents(parents: Sequence[Sequence[int]]) -> np.ndarray:
    """Return ``[B, N, N]``, True where the second node is an ancestor of the first or the first itself.

    ``parents[b][n]`` is the parent of node n and precedes it; node 0 is the root and its own parent. Shorter rows are padded with
    nodes whose only ancestor is the root.
    """
    B, N = len(parents), max(map(len, parents))
    ancestors = np.zeros((B, N, N), dtype=np.bool_)
    ancestors[:, np.arange(N), np.arange(N)] = True
    ancestors[:, :, 0] = True
    for b, row in enumerate(parents):
        for node in range(1, len(row)):
            if row[node]:
                ancestors[b, node] |= ancestors[b, row[node]]
    return ancestors


def extend_ancestors(ancestors_BNM: Tensor | None, parents_BN: Tensor) -> Tensor:
    """Return the ancestors of the next level's nodes among all nodes so far, themselves included: ``[B, N', M + N']``.

    ``ancestors_BNM`` are those of the previous level (None: this is the first); ``parents_BN`` are the parents' indices in that level.
    """
    B, N = parents_BN.shape
    itself_BNN = torch.eye(N, dtype=torch.bool, device=parents_BN.device).expand(B, N, N)
    if ancestors_BNM is None:
        return itself_BNN
    above_BNM = ancestors_BNM.gather(1, parents_BN[..., None].expand(-1, -1, ancestors_BNM.shape[-1]))
    return torch.cat([above_BNM, itself_BNN], -1)


def visible_slots(lengths_B: Tensor, ancestors_BNM: Tensor, slots: int) -> Tensor:
    """Return the mask ``[B, N, S]``, True where a node attends: its row's past, its ancestors and itself."""
    N, M = ancestors_BNM.shape[1:]
    seen_BNX = F.pad(F.pad(ancestors_BNM, (1, 0), value=True), (0, 1), value=False)  # X: the past, the nodes, what lies behind them
    index_BS = (torch.arange(1, slots + 1, device=lengths_B.device) - lengths_B[:, None]).clamp(0, M + 1)
    return seen_BNX.gather(2, index_BS[:, None].expand(-1, N, -1))


def masks_by_kind(
    positions_BN: Tensor, positions_BM: Tensor, ancestors_BNM: Tensor, lengths_B: Tensor, slots: int, windows: dict[str, int | None]
) -> dict[str, Tensor]:
    """Return the mask ``[B, N, S]`` of each kind of attention layer, True where a node at ``positions_BN`` attends.

    ``positions_BM`` are the positions of all nodes. Windows count positions, and siblings share a position.
    """
    allowed_BNS = visible_slots(lengths_B, ancestors_BNM, slots)
    if not any(windows.values()):
        return dict.fromkeys(windows, allowed_BNS)
    slots_S = torch.arange(slots, device=lengths_B.device)
    node_BS = (slots_S - lengths_B[:, None]).clamp(min=0).clamp(max=ancestors_BNM.shape[-1] - 1)
    key_BS = torch.where(slots_S < lengths_B[:, None], slots_S, positions_BM.gather(1, node_BS))
    distance_BNS = positions_BN[..., None] - key_BS[:, None]
    return {kind: allowed_BNS if window is None else allowed_BNS & (distance_BNS < window) for kind, window in windows.items()}
