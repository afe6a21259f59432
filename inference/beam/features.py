"""The features of tries' nodes, kept as long as the nodes are, so that drafters can take them in once a beam has gone by them.

Shape suffixes: B batch, R lists of nodes, P nodes of a list.
"""

from __future__ import annotations

import torch

from headstart.heads.backbone.features import Features
from headstart.support.nest import map_tensors


class NodeFeatures:
    """By row and number of the node."""

    def __init__(self, like: Features) -> None:
        """No nodes yet, in as many rows as these features have."""
        self.features = map_tensors(lambda tensor: tensor[:, :0], like)
        self.before: list[int] = []
        """How many nodes each row had before the last were added, which have their places from ``longest`` on."""
        self.longest = 0

    def add(self, features: Features, before: list[int]) -> None:
        """Those just read of each row, whose numbers begin with these."""
        kept = self.features
        taps = None
        if kept.taps is not None and features.taps is not None:
            taps = {tap: torch.cat([one, features.taps[tap]], 1) for tap, one in kept.taps.items()}
        tokens, hidden = ((kept.tokens_BT, features.tokens_BT), (kept.hidden_BTD, features.hidden_BTD))
        self.longest, self.before = kept.tokens_BT.shape[1], before
        self.features = Features(torch.cat(tokens, 1), torch.cat(hidden, 1), taps)

    def of(self, rows: list[int], nodes: list[list[int]]) -> Features:
        """Of each list of nodes of a row, in order, right-padded."""
        longest, device = max(map(len, nodes)), self.features.tokens_BT.device
        places = [[self._place(row, node) for node in one] + [0] * (longest - len(one)) for row, one in zip(rows, nodes, strict=True)]
        counts_R1 = torch.tensor([len(one) for one in nodes], device=device)[:, None]
        places_RP = torch.tensor(places, dtype=torch.int64, device=device).view(len(rows), longest)
        of_rows = self.features.rows(torch.tensor(rows, device=device))
        return of_rows.gather(places_RP, torch.arange(longest, device=device) < counts_R1)

    def keep(self, nodes: list[list[int]]) -> None:
        """Of each row only these go on, numbered from 0."""
        self.features = self.of(list(range(len(nodes))), nodes)

    def select(self, rows: list[int]) -> None:
        """Go on with these rows alone."""
        self.features = self.features.rows(torch.tensor(rows, device=self.features.tokens_BT.device))

    def _place(self, row: int, node: int) -> int:
        return node if node < self.before[row] else self.longest + node - self.before[row]
