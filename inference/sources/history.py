"""What followed in earlier texts: one suffix automaton over texts that are over (the global tree of SuffixDecoding, 2411.04975)."""

from __future__ import annotations

from functools import partial

from headstart.heads.base import require_count
from headstart.inference.sources.best_first import grow
from headstart.inference.sources.proposer import Candidates, Proposer
from headstart.inference.sources.suffix import Automaton, Match, following

LONGEST = 16
"""How many of a text's last tokens are looked for in earlier texts."""


class HistoryProposer(Proposer):
    """Continues each row as earlier texts went on. A text is over when its row is opened again.

    ``tokens``: when more are remembered, all are forgotten and it begins anew with the newest text.
    """

    name = "memory"

    def __init__(self, tokens: int = 100_000) -> None:
        require_count("tokens", tokens, of="memory")
        self.tokens = tokens
        self.texts: dict[int, list[int]] = {}
        self.earlier = Automaton([])
        self.count = 0

    def open(self, row: int, tokens: list[int]) -> None:
        if row in self.texts:
            self._remember(self.texts[row])
        self.texts[row] = list(tokens)

    def extend(self, row: int, tokens: list[int]) -> None:
        self.texts[row] += tokens

    def propose(self, row: int, depth: int, nodes: int) -> Candidates:
        return grow(self._match(self.texts[row][-LONGEST:]), partial(following, self.earlier), depth, nodes)

    def _remember(self, tokens: list[int]) -> None:
        tokens = tokens[-self.tokens :]
        if self.count + len(tokens) > self.tokens:
            self.earlier, self.count = Automaton([]), 0
        self.earlier.begin()
        for token in tokens:
            self.earlier.add(token)
        self.count += len(tokens)

    def _match(self, tokens: list[int]) -> Match:
        """The longest suffix of these that occurs in an earlier text. Looked for afresh, as states part when texts are added."""
        earlier, state, length = self.earlier, 0, 0
        for token in tokens:
            while state and token not in earlier.next[state]:
                state = earlier.link[state]
                length = earlier.length[state]
            if token in earlier.next[state]:
                state, length = earlier.next[state][token], length + 1
        return state, length
