"""n-gram drafts from the sequence itself, by a suffix automaton of its prompt and output.

The longest suffix of a sequence that also occurs earlier in it is looked up, and the tokens that followed there are drafted (prompt
lookup; SAM-Decoding, 2411.10666, uses an automaton; SuffixDecoding, 2411.04975, builds trees by counts). Shorter suffixes are looked up
too, since other tokens may have followed them.
"""

from collections.abc import Iterator
from functools import partial
from itertools import islice

from headstart.heads.base import require_count
from headstart.inference.engine.proposer import Candidates, Proposer, grow

DOUBT = 4.0
"""Weight of an unseen continuation, per distinct continuation, after a match of one token; 1/L of it after a match of L tokens.

Fitted, with `NEWEST_BONUS`, to answers of 7B models, library code and sampled text: a token that had followed a match once followed it
again with probability 0.3 after one matched token, 0.44 after two, 0.6 after four and 0.8 after twelve.
"""
NEWEST_BONUS = 0.5
"""Additional observations credited to the newest continuation, which is two to four times as likely as older ones."""
MAX_SUFFIXES = 3
"""Maximum number of suffixes looked up, longest first. A fourth makes no measurable difference."""
MAX_CONTINUATIONS = 8
"""Maximum number of continuations considered per suffix, newest first, so that the cost does not depend on the sequence."""

Match = tuple[int, int]
"""A state of the automaton (0: the empty string, no match) and the length of the matched string."""


class Automaton:
    """A suffix automaton (Blumer et al., 1985), extended token by token, that counts continuations.

    A state represents all strings with the same end positions so far. `next` holds their continuations, newest last; `link` leads to the
    longest suffix with more end positions; state 0 is the empty string. Adding a token takes amortised constant time, apart from copying
    a state's continuations when it is cloned.

    A token is counted only at the longest suffix that it had followed before. The construction ends at that state, so counting is free.
    Counts of shorter suffixes then cover only tokens that longer ones did not predict, the case in which they are used (update exclusion,
    as in PPM compression). Counting at every suffix would take one step per suffix, and predicted no better.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.next: list[dict[int, int]] = [{}]
        """For each state, its continuations: token -> state of the extended string, least recently counted first."""
        self.link, self.length = [-1], [0]
        """For each state, its suffix link (-1: none) and the length of its longest string."""
        self.totals = [0]
        """For each state, the number of continuations counted."""
        self.repeats: list[dict[int, int] | None] = [None]
        """For each state, how often each continuation was counted after the first time; None: none was."""
        self.last = 0
        """The state of the whole string."""
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
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
            known = self._clone(state, token, known)
        self.link[new] = known

    def separate(self) -> None:
        """Start another sequence, preceded by a separator that is not a token, so that no match spans two sequences."""
        self.last = 0
        self.add(-len(self.link))

    def match(self) -> Match:
        """The longest suffix that also occurs earlier."""
        state = max(self.link[self.last], 0)
        return state, self.length[state]

    def seen(self, state: int, token: int) -> int:
        """How often that continuation was counted at that state."""
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

    def _clone(self, state: int, token: int, known: int) -> int:
        """Split ``known``: its shorter strings now have one more end position than its longer ones, so they get a separate state."""
        repeats = self.repeats[known]
        clone = self._state(
            self.length[state] + 1, self.link[known], dict(self.next[known]), self.totals[known], None if repeats is None else dict(repeats)
        )
        self.link[known] = clone
        while state >= 0 and self.next[state].get(token) == known:
            self.next[state][token] = clone
            state = self.link[state]
        return clone


def following(automaton: Automaton, match: Match, least: float) -> Iterator[tuple[int, float, Match]]:
    """Possible next tokens after a match, their probabilities, and the matches they lead to.

    After a suffix of length L with n counted continuations, d of them distinct, a token counted c times has probability
    ``c / (n + DOUBT d / L)``; the remainder goes to the next shorter suffix, as long as it is at least ``least``.
    """
    probs: dict[int, float] = {}
    longest: dict[int, Match] = {}
    state, length = match
    remainder, suffixes = 1.0, 0
    while state > 0 and suffixes < MAX_SUFFIXES and remainder >= least:
        tokens, repeats = automaton.next[state], automaton.repeats[state]
        if tokens:
            doubt = DOUBT * len(tokens) / length
            share = remainder / (automaton.totals[state] + NEWEST_BONUS + doubt)
            extra = NEWEST_BONUS
            for token in islice(reversed(tokens), MAX_CONTINUATIONS):
                count = 1 + extra + (repeats.get(token, 0) if repeats else 0)
                extra = 0.0
                if token in probs:
                    probs[token] += share * count
                elif share * count >= least:
                    probs[token] = share * count
                    longest[token] = (tokens[token], length + 1)
            remainder = share * doubt
            suffixes += 1
        state = automaton.link[state]
        length = automaton.length[state]
    return ((token, prob, longest[token]) for token, prob in probs.items())


class SuffixProposer(Proposer):
    """Drafts continuations of repeated n-grams of the same sequence. ``longest``: only that many last tokens of a prompt are indexed.

    The automaton takes about half a kilobyte per token.
    """

    name = "suffix"

    def __init__(self, longest: int = 65_536) -> None:
        require_count("longest", longest, of="suffix")
        self.longest = longest
        self.automata: dict[int, Automaton] = {}
        self.unindexed: dict[int, list[int]] = {}
        """Tokens not yet added to each automaton, which is updated only before a proposal."""

    def open(self, sequence: int, tokens: list[int]) -> None:
        self.automata[sequence], self.unindexed[sequence] = Automaton([]), tokens[-self.longest :]

    def extend(self, sequence: int, tokens: list[int]) -> None:
        self.unindexed[sequence] += tokens

    def catch_up(self, sequence: int) -> None:
        for token in self.unindexed[sequence]:
            self.automata[sequence].add(token)
        self.unindexed[sequence] = []

    def propose(self, sequence: int, depths: int, nodes: int) -> Candidates:
        self.catch_up(sequence)
        automaton = self.automata[sequence]
        return grow(automaton.match(), partial(following, automaton), depths, nodes)
