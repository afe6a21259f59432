"""n-gram drafts from finished sequences: one suffix automaton over all of them (the global tree of SuffixDecoding, 2411.04975)."""

from functools import partial

from headstart.heads.base import require_count
from headstart.inference.engine.proposer import Candidates, Proposer, grow
from headstart.inference.engine.suffix import Automaton, Match, following

MAX_MATCH = 16
"""The number of a sequence's last tokens that are looked up in earlier sequences."""


class HistoryProposer(Proposer):
    """Drafts continuations from finished sequences. A sequence is finished when its number is opened again.

    ``tokens``: the capacity, about 60 MB at 100,000; beyond it, the automaton is emptied before the newest sequence is added.
    """

    name = "history"

    def __init__(self, tokens: int = 100_000) -> None:
        require_count("tokens", tokens, of="history")
        self.tokens = tokens
        self.sequences: dict[int, list[int]] = {}
        self.earlier = Automaton([])
        self.count = 0

    def open(self, sequence: int, tokens: list[int]) -> None:
        if sequence in self.sequences:
            self._add(self.sequences[sequence])
        self.sequences[sequence] = list(tokens)

    def extend(self, sequence: int, tokens: list[int]) -> None:
        self.sequences[sequence] += tokens

    def propose(self, sequence: int, depths: int, nodes: int) -> Candidates:
        return grow(self._match(self.sequences[sequence][-MAX_MATCH:]), partial(following, self.earlier), depths, nodes)

    def _add(self, tokens: list[int]) -> None:
        tokens = tokens[-self.tokens :]
        if self.count + len(tokens) > self.tokens:
            self.earlier, self.count = Automaton([]), 0
        self.earlier.separate()
        for token in tokens:
            self.earlier.add(token)
        self.count += len(tokens)

    def _match(self, tokens: list[int]) -> Match:
        """The longest suffix of these tokens that occurs in an earlier sequence; looked up every time, since states may be cloned."""
        earlier, state, length = self.earlier, 0, 0
        for token in tokens:
            while state and token not in earlier.next[state]:
                state = earlier.link[state]
                length = earlier.length[state]
            if token in earlier.next[state]:
                state, length = earlier.next[state][token], length + 1
        return state, length
