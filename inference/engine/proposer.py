"""Proposers draft on the host without training, from a sequence's tokens and the backbone's earlier next-token distributions.

A proposer expands a trie best first: the most likely node is added until it is large enough. `ProposerSource` makes it a source.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from importlib import import_module
from typing import TypeVar

from headstart.heads.backbone.features import Features
from headstart.inference.engine.source import Accepted, Rows, Source
from headstart.inference.engine.texts import Texts
from headstart.inference.engine.tree import Pool
from headstart.support.errors import UserError

NAMES = ("suffix", "recycling", "history")
"""Drafts that need no training, a file of this folder each, which is its name for commands and for `headstart.load`."""

MIN_PATH_PROB = 0.005
"""Minimum path probability of a node: no tree would include less likely ones."""

Other = TypeVar("Other")
State = TypeVar("State")
"""A proposer's state after a token, such as the state of an automaton."""
Expand = Callable[[State, float], Iterable[tuple[int, float, State]]]
"""(state, minimum probability) -> distinct next tokens, each with its probability in (0, 1) and state; less likely ones may be omitted."""


def grow(root: State, expand: Expand[State], depths: int, nodes: int) -> Candidates:
    """The ``nodes`` nodes of largest path probability, at depths 0 to ``depths - 1``."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # Path probability (negated: the heap is a min-heap), parent, token, probability given the parent, level, state.
    # No two entries have the same parent and token, so states are never compared.
    waiting: list[tuple[float, int, int, float, int, State]] = []
    state, node, path_prob, level = root, -1, 1.0, 0
    while True:
        if level < depths:
            for token, prob, after in expand(state, MIN_PATH_PROB / path_prob):
                heappush(waiting, (-path_prob * prob, node, token, prob, level + 1, after))
        if not waiting or len(tokens) >= nodes:
            return Candidates(tokens, parents, scores)
        negative, parent, token, prob, level, state = heappop(waiting)
        node, path_prob = len(tokens), -negative
        tokens.append(token)
        parents.append(parent)
        scores.append(math.log(prob))


@dataclass(frozen=True)
class Candidates:
    """Continuations of one sequence's root as a trie; a parent precedes its children."""

    tokens: list[int]
    parents: list[int]
    """Index of each node's parent in these lists; -1: the root."""
    scores: list[float]
    """Log of the proposer's estimate of the acceptance probability given that the parent is accepted; not summed along the path."""


class Proposer(ABC):
    """Base class: define `name`, `open`, `extend` and `propose`, and override the other methods as needed.

    Sequences are identified by numbers. A sequence consists of all its tokens, prompt included; the last one is the root, which the
    backbone has picked but not read yet.
    """

    name: str
    observe_top_k: int = 0
    """The number of most likely next tokens of every verified node to pass to `observe`; 0: it is not called."""

    @abstractmethod
    def open(self, sequence: int, tokens: list[int]) -> None:
        """Start a sequence with the prompt and the first root; an earlier sequence with that number is finished."""

    @abstractmethod
    def extend(self, sequence: int, tokens: list[int]) -> None:
        """Add newly written tokens; the last one is the new root."""

    def observe(self, tokens: list[int], top_tokens: list[list[int]], logprobs: list[list[float]]) -> None:
        """Receive each verified node's token, its `observe_top_k` most likely next tokens and their log-probabilities, best first."""
        return None

    def catch_up(self, sequence: int) -> None:
        """Do work deferred by `open` and `extend`; called before `propose`."""
        return None

    @abstractmethod
    def propose(self, sequence: int, depths: int, nodes: int) -> Candidates:
        """Draft at most ``nodes`` nodes that may follow the sequence, at depths 0 to ``depths - 1``."""


def made(proposers: str | Sequence[str | Proposer | Other]) -> list[Proposer | Other]:
    """Make new proposers of the names among these, and keep the others; each name once. Raises UserError for a name that there is not."""
    listed = [proposers] if isinstance(proposers, str) else list(dict.fromkeys(proposers))
    unknown = [proposer for proposer in listed if isinstance(proposer, str) and proposer not in NAMES]
    if unknown:
        raise UserError(f"no proposer {unknown[0]!r}; choose any of {', '.join(NAMES)}, or give draft_model or early_exit")
    return [_named(proposer) if isinstance(proposer, str) else proposer for proposer in listed]


def _named(name: str) -> Proposer:
    proposer: Proposer = getattr(import_module(f"{__package__}.{name}"), f"{name.title()}Proposer")()
    return proposer


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
            if tokens:  # none where a step that was taken later has ended the text
                self.proposer.extend(sequence, tokens)

    def observe(self, tokens: list[int], top_tokens: list[list[int]], logprobs: list[list[float]]) -> None:
        self.proposer.observe(tokens, top_tokens, logprobs)

    def timed_as(self, rows: int, depths: int) -> tuple[Hashable, int]:
        return self.name, 1  # further depths take next to no time

    def keep_up(self, rows: Rows) -> None:
        for sequence in rows.sequences:
            self.proposer.catch_up(sequence)

    def draft(self, rows: Rows, pools: Sequence[Pool], depths: int) -> None:
        for row, (remaining, sequence, pool) in enumerate(zip(rows.remaining, rows.sequences, pools, strict=True)):
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


SCORE = math.log(0.95)
"""The log-probability that a forced token is picked, before any was."""


class ForcedProposer(Proposer):
    """Asks the processors of a call (see `Forked`). ``texts``: those of the call, set for each."""

    name = "forced"

    def __init__(self) -> None:
        self.texts: Texts

    def open(self, sequence: int, tokens: list[int]) -> None:
        """Texts are read from the call."""

    extend = open

    def propose(self, sequence: int, depths: int, nodes: int) -> Candidates:
        forked = self.texts.request.processing.forked[sequence].values()
        asked, ids_1T = [state.forced for state in forked if state.forced is not None], self.texts.of[sequence].ids_T[None]
        tokens = min((forced(ids_1T) for forced in asked), key=len, default=[])[: min(depths, nodes)]
        return Candidates(tokens, list(range(-1, len(tokens) - 1)), [SCORE] * len(tokens))
