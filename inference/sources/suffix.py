"""What followed when the text last stood here: a suffix automaton of each row's text, prompt and output.

The longest suffix of the text that also occurs earlier in it, and what followed there, is a draft for nothing (prompt lookup;
SAM-Decoding, 2411.10666, finds it with an automaton; SuffixDecoding, 2411.04975, makes trees of it by counts). Shorter suffixes are
looked at too, since what followed those may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice

from headstart.heads.base import require_count
from headstart.inference.sources.best_first import grow
from headstart.inference.sources.proposer import Candidates, Proposer

DOUBT = 4.0
"""How many observations against what was seen each different continuation counts as, after a match of one token; after L, 1/L of it.

Fitted, with `NEWEST`, to answers of 7B models, library code and sampled text: 0.3 of what followed one token once followed it again,
0.44 after two tokens, 0.6 after four, 0.8 after twelve.
"""
NEWEST = 0.5
"""How many observations more the newest continuation counts as: of several it is two to four times as likely."""
CONTEXTS = 3
"""How many suffixes are asked, longest first. A fourth changes nothing measurable."""
WIDEST = 8
"""How many continuations of one suffix are looked at, newest first, so that a proposal costs the same in every text."""

Match = tuple[int, int]
"""A state of the automaton (0: the empty string, nothing matches) and the length of that of its strings which matched."""


class Automaton:
    """A suffix automaton (Blumer et al., 1985) that grows token by token and counts what followed.

    A state stands for some strings that have ended at the same places so far. `next` holds what followed them, newest last; `link`
    leads to the longest of their suffixes that ended at more places; state 0 is the empty string. Adding a token costs amortised
    constant time, apart from copying a state's continuations when its strings part.

    A token is counted only after the longest suffix that it had followed before: the place where the automaton's own walk ends, so
    that counts cost nothing. Shorter suffixes then count what longer ones could not tell, which is what they are asked for
    (update exclusion, as in PPM compression). Counting every suffix would cost as many steps as there are, and predicted no better.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.next: list[dict[int, int]] = [{}]
        """Of each state, the token that followed -> the state of the string it made, in the order last counted."""
        self.link, self.length = [-1], [0]
        """The state of a shorter suffix (-1: none); the length of the longest of a state's strings."""
        self.totals = [0]
        """How many continuations a state has counted."""
        self.repeats: list[dict[int, int] | None] = [None]
        """How often a continuation was counted after the first time; None: never."""
        self.last = 0
        """The state of the whole text."""
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """The text goes on with that token."""
        new, state = self._state(self.length[self.last] + 1, 0, {}, 0, None), self.last
        self.last = new
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            self.totals[state] += 1
            state = self.link[state]
        if state < 0:
            return
        self._count(state, token)
        known = self.next[state][token]
        if self.length[known] > self.length[state] + 1:
            known = self._part(state, token, known)
        self.link[new] = known

    def begin(self) -> None:
        """Another text begins. A mark that is no token stands before it, so that it shares no state with what was there."""
        self.last = 0
        self.add(-len(self.link))

    def match(self) -> Match:
        """The longest suffix of the text that also ended earlier."""
        state = max(self.link[self.last], 0)
        return state, self.length[state]

    def seen(self, state: int, token: int) -> int:
        """How often that continuation was counted there."""
        if token not in self.next[state]:
            return 0
        return 1 + (self.repeats[state] or {}).get(token, 0)

    def _state(self, length: int, link: int, following: dict[int, int], total: int, repeats: dict[int, int] | None) -> int:
        self.length.append(length)
        self.link.append(link)
        self.next.append(following)
        self.totals.append(total)
        self.repeats.append(repeats)
        return len(self.link) - 1

    def _count(self, state: int, token: int) -> None:
        self.totals[state] += 1
        repeats = self.repeats[state]
        if repeats is None:
            repeats = self.repeats[state] = {}
        repeats[token] = repeats.get(token, 0) + 1
        self.next[state][token] = self.next[state].pop(token)

    def _part(self, state: int, token: int, known: int) -> int:
        """The shorter strings of ``known`` have now ended at one place more than the longer: they get a state of their own."""
        repeats = self.repeats[known]
        part = self._state(
            self.length[state] + 1, self.link[known], dict(self.next[known]), self.totals[known], None if repeats is None else dict(repeats)
        )
        self.link[known] = part
        while state >= 0 and self.next[state].get(token) == known:
            self.next[state][token] = part
            state = self.link[state]
        return part


def following(text: Automaton, match: Match, least: float) -> Iterator[tuple[int, float, Match]]:
    """What may come after a match: tokens, their chances, and the matches they make.

    A suffix of length L that was followed by n tokens, d of them different, says of one that was seen c times that its chance is
    ``c / (n + DOUBT d / L)``, and leaves the rest to the next shorter suffix, as long as that rest is at least ``least``.
    """
    chances: dict[int, float] = {}
    longest: dict[int, Match] = {}
    state, length = match
    left, asked = 1.0, 0
    while state > 0 and asked < CONTEXTS and left >= least:
        tokens, repeats = text.next[state], text.repeats[state]
        if tokens:
            doubt = DOUBT * len(tokens) / length
            share = left / (text.totals[state] + NEWEST + doubt)
            extra = NEWEST
            for token in islice(reversed(tokens), WIDEST):
                count = 1 + extra + (repeats.get(token, 0) if repeats else 0)
                extra = 0.0
                if token in chances:
                    chances[token] += share * count
                elif share * count >= least:
                    chances[token] = share * count
                    longest[token] = (tokens[token], length + 1)
            left = share * doubt
            asked += 1
        state = text.link[state]
        length = text.length[state]
    return ((token, chance, longest[token]) for token, chance in chances.items())


class SuffixProposer(Proposer):
    """Continues each row as it went on earlier in its own text. ``longest``: of a longer prompt, only that many last tokens are known.

    The automaton takes about half a kilobyte a token.
    """

    name = "suffix"

    def __init__(self, longest: int = 65_536) -> None:
        require_count("longest", longest, of="suffix")
        self.longest = longest
        self.texts: dict[int, Automaton] = {}
        self.unread: dict[int, list[int]] = {}
        """What the automaton of each row lacks: of rows for which nothing is proposed none is grown."""

    def open(self, row: int, tokens: list[int]) -> None:
        self.texts[row], self.unread[row] = Automaton([]), tokens[-self.longest :]

    def extend(self, row: int, tokens: list[int]) -> None:
        self.unread[row] += tokens

    def catch_up(self, row: int) -> None:
        for token in self.unread[row]:
            self.texts[row].add(token)
        self.unread[row] = []

    def propose(self, row: int, depth: int, nodes: int) -> Candidates:
        self.catch_up(row)
        text = self.texts[row]
        return grow(text.match(), partial(following, text), depth, nodes)
