"""A proposer as a source, which drafts on the host."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from headstart.heads.backbone.features import Features
from headstart.inference.engine.tree import Pool
from headstart.inference.sources.proposer import Candidates, Proposer
from headstart.inference.sources.source import Accepted, Rows, Source

MAX_PROPOSER_DEPTH = 12
"""Maximum number of depths that a proposer drafts."""
MAX_PROPOSED_NODES = 24
"""Maximum number of nodes that a proposer drafts for a row."""
MAX_PROPOSER_ROWS = 16
"""Maximum number of rows for which proposers draft: they take Python's time for every row, and a pass over many rows has none to spare."""


class ProposerSource(Source):
    """A proposer. It identifies sequences by number, so it needs no update when rows are removed."""

    most_rows = MAX_PROPOSER_ROWS

    def __init__(self, proposer: Proposer) -> None:
        super().__init__(proposer.name, MAX_PROPOSER_DEPTH)
        self.proposer, self.observe_top_k = proposer, proposer.observe_top_k

    def join(self, sequences: list[int], tokens: list[list[int]], features: Features) -> None:
        for sequence, prompt in zip(sequences, tokens, strict=True):
            self.proposer.open(sequence, prompt)

    def extend(self, accepted: Accepted) -> None:
        for sequence, tokens in zip(accepted.sequences, accepted.tokens, strict=True):
            self.proposer.extend(sequence, tokens)

    def observe(self, tokens: list[int], top_tokens: list[list[int]], logprobs: list[list[float]]) -> None:
        self.proposer.observe(tokens, top_tokens, logprobs)

    def timed_as(self, rows: int, depths: int) -> tuple[Hashable, int]:
        return self.name, 1  # further depths take next to no time

    def draft(self, rows: Rows, pools: Sequence[Pool], depths: int) -> None:
        for row, (remaining, sequence, pool) in enumerate(zip(rows.remaining, rows.sequences, pools, strict=True)):
            self.proposer.catch_up(sequence)
            if remaining <= 0:
                continue
            proposed, nodes = self.proposer.propose(sequence, min(remaining, depths), MAX_PROPOSED_NODES), list[int]()
            for token, parent, score in zip(proposed.tokens, proposed.parents, proposed.scores, strict=True):
                node = nodes[parent] if parent >= 0 else 0
                nodes.append(pool.add(self, node, token, score, self.prob(rows, row, pool.levels[node], score)))

    def propose_after(self, number: int, tokens: list[int], depths: int) -> Candidates:
        """Candidates after these tokens, prompt included, which replace the sequence of that number."""
        self.proposer.open(number, tokens)
        return self.proposer.propose(number, depths, MAX_PROPOSED_NODES)
