"""Which drafted tokens are the backbone's own: walk from the root while a child carries the pick (DESIGN: shared noise).

No acceptance probabilities, no residual distributions, no special case for greedy decoding.

Shape suffixes: B batch, N tree nodes, P path, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.inference.tree import CandidateTree


@dataclass(frozen=True)
class Accepted:
    """The accepted path of each row, right-padded: its nodes, how many, and the pick at each (the last one is the next root)."""

    path_BP: Tensor
    count_B: Tensor
    picks_BP: Tensor


def pick(scores: Tensor, noise: Tensor | None) -> Tensor:
    """The decoding rule: ``argmax_v (scores + noise)`` over the last dimension; no noise is temperature 0."""
    return (scores if noise is None else scores + noise).argmax(-1)


def walk(tree: CandidateTree, picks_BN: Tensor) -> Accepted:
    """The longest path from the root on which every token is the pick at its parent. Nothing is read back to the host."""
    B, N = picks_BN.shape
    if N == 1:
        return Accepted(torch.zeros_like(picks_BN), torch.ones_like(picks_BN[:, 0]), picks_BN)
    wrong_BN = tree.tokens_BN != picks_BN.gather(1, tree.parents_BN)
    wrong_BN[:, 0] = False
    on_path_BN = ~(tree.ancestors_BNN & wrong_BN[:, None]).any(-1)
    deepest_B = (on_path_BN * (tree.depths_BN + 1)).argmax(1)
    path_mask_BN = tree.ancestors_BNN[torch.arange(B, device=picks_BN.device), deepest_B]
    place_N = torch.arange(N, device=picks_BN.device)
    path_BP = torch.where(path_mask_BN, place_N, N).sort(1).values[:, : tree.height + 1].clamp(max=N - 1)
    return Accepted(path_BP, path_mask_BN.sum(1), picks_BN.gather(1, path_BP))
