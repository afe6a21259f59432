"""Proposers draft on the host without training, from a sequence's tokens and the backbone's earlier next-token distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


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

    def verified(self, sequence: int, tokens: Sequence[int], parents: Sequence[int], picks: Sequence[int]) -> None:
        """Receive a sequence's verified tree, the root first, and the pick at every node, after `extend` by the tokens written."""
        return None

    def catch_up(self, sequence: int) -> None:
        """Do work deferred by `open` and `extend`; called before `propose`."""
        return None

    @abstractmethod
    def propose(self, sequence: int, depths: int, nodes: int) -> Candidates:
        """Draft at most ``nodes`` nodes that may follow the sequence, at depths 0 to ``depths - 1``."""
