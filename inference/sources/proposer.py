"""Proposers draft without training, on the host: from the tokens of a sequence and the backbone's earlier next-token distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidates:
    """Continuations of one sequence's root, as a trie: a parent precedes its children."""

    tokens: list[int]
    parents: list[int]
    """Index of each node's parent in these lists; -1: the root."""
    scores: list[float]
    """Log of the proposer's estimate of the acceptance probability, given that the parent is accepted; not added up along the path."""


class Proposer(ABC):
    """Subclass it with `name`, `open`, `extend` and `propose`, and override the others as needed.

    Sequences are known by numbers. A sequence is all its tokens, prompt included; the last one is the root, which the backbone has
    picked and not read yet.
    """

    name: str
    observe_top_k: int = 0
    """How many of the likeliest next tokens `observe` wants of every verified node; 0: it is not called."""

    @abstractmethod
    def open(self, sequence: int, tokens: list[int]) -> None:
        """A new sequence of that number: the prompt and the first root. The old one of that number is over."""

    @abstractmethod
    def extend(self, sequence: int, tokens: list[int]) -> None:
        """Tokens just written; the last one is the new root."""

    def observe(self, tokens: list[int], top_tokens: list[list[int]], logprobs: list[list[float]]) -> None:
        """For each verified node its token, the `observe_top_k` likeliest next tokens and their log-probabilities, best first."""
        return None

    def catch_up(self, sequence: int) -> None:
        """Do the work that `open` and `extend` put off: drafts of the sequence are wanted now. It does not count as drafting time."""
        return None

    @abstractmethod
    def propose(self, sequence: int, depths: int, nodes: int) -> Candidates:
        """At most ``nodes`` nodes that may follow the sequence, of depths 0 to ``depths - 1``."""
