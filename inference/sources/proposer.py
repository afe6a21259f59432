"""What drafts without training: a proposer, which knows the text and what the backbone has said of it, and lives on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidates:
    """Continuations of one row's root, as a trie: a parent stands before its children."""

    tokens: list[int]
    parents: list[int]
    """The place of each node's parent in these lists; -1: the root."""
    scores: list[float]
    """Log of the proposer's own estimate that the node is the pick, given that its parent is; not added up along the path."""


class Proposer(ABC):
    """Subclass it, give `name`, `extend` and `propose`, and what of the others it needs.

    Rows are the places of a batch; the text of a row is all its tokens, the prompt's and the written ones. Its last token is the
    root: the backbone has picked it and not read it yet.
    """

    name: str
    watches: int = 0
    """How many of the likeliest next tokens it wants to `see` of every node the backbone has read."""

    @abstractmethod
    def open(self, row: int, tokens: list[int]) -> None:
        """A new text in that row: the prompt and the first root. What was there is over."""

    @abstractmethod
    def extend(self, row: int, tokens: list[int]) -> None:
        """What the row has just written; the last token is its new root."""

    def see(self, tokens: list[int], likeliest: list[list[int]], logprobs: list[list[float]]) -> None:
        """For each node just read, its token, the `watches` likeliest next tokens, and their log-probabilities, best first."""
        return None

    def catch_up(self, row: int) -> None:
        """Do what `open` and `extend` have put off: the row's drafts are wanted now. The time it takes is not counted as drafting."""
        return None

    @abstractmethod
    def propose(self, row: int, depth: int, nodes: int) -> Candidates:
        """What may follow the row's text: at most ``nodes`` nodes, none deeper than ``depth`` below the root (its children: depth 1)."""
