"""The features of trie nodes, kept as long as the nodes, so that drafters can read them once a beam continues through them.

Shape suffixes: B batch, R lists of nodes, P nodes of a list.
"""

from __future__ import annotations

import torch

from headstart.heads.backbone.features import Features
from headstart.support.pytree import map_tensors


class NodeFeatures:
    """Features by row and node number."""

    def __init__(self, like: Features) -> None:
        """Start without nodes, with as many rows as these features have."""
        self.features = map_tensors(lambda tensor: tensor[:, :0], like)
        self.before: list[int] = []
        """How many nodes each row had before the last `add`, whose nodes are stored from index ``longest`` on."""
        self.longest = 0

    def add(self, features: Features, before: list[int]) -> None:
        """Add the features of each row's newly verified nodes, which are numbered from ``before[row]`` on."""
        kept = self.features
        taps = None
        if kept.taps is not None and features.taps is not None:
            taps = {tap: torch.cat([one, features.taps[tap]], 1) for tap, one in kept.taps.items()}
        tokens, hidden = ((kept.tokens_BT, features.tokens_BT), (kept.hidden_BTD, features.hidden_BTD))
        self.longest, self.before = kept.tokens_BT.shape[1], before
        self.features = Features(torch.cat(tokens, 1), torch.cat(hidden, 1), taps)

    def of(self, rows: list[int], nodes: list[list[int]]) -> Features:
        """The features of each list of nodes, ``nodes[i]`` of row ``rows[i]``, right-padded."""
        longest, device = max(map(len, nodes)), self.features.tokens_BT.device
        indices = [[self._index(row, node) for node in one] + [0] * (longest - len(one)) for row, one in zip(rows, nodes, strict=True)]
        counts_R1 = torch.tensor([len(one) for one in nodes], device=device)[:, None]
        index_RP = torch.tensor(indices, dtype=torch.int64, device=device).view(len(rows), longest)
        of_rows = self.features.rows(torch.tensor(rows, device=device))
        return of_rows.gather(index_RP, torch.arange(longest, device=device) < counts_R1)

    def keep(self, nodes: list[list[int]]) -> None:
        """Keep only these nodes of each row and renumber them from 0."""
        self.features = self.of(list(range(len(nodes))), nodes)

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self.features = self.features.rows(torch.tensor(rows, device=self.features.tokens_BT.device))

    def _index(self, row: int, node: int) -> int:
        return node if node < self.before[row] else self.longest + node - self.before[row]
