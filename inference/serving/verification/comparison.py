"""What two engines drafted for the same prompts, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headstart.inference.serving.transcript import Round, Transcript, acceptance_rate_per_position, mean_acceptance_length, tau

NearTie = Callable[[Sequence[int], int | None, tuple[int, int]], bool]
"""Whether rounding decides between two tokens after these ones, of which so many are drafts; None: between tokens of the text."""


@dataclass(frozen=True)
class Difference:
    """The first draft that differs, or the first token of a text."""

    prompt: int
    """Number of the prompt, from 1."""
    position: int
    """Tokens before the draft."""
    depth: int | None
    """None: the backbone's own token."""
    ours: int
    theirs: int
    """The token that either side drafts."""


@dataclass(frozen=True)
class Comparison:
    """Counts over all prompts. Drafts are compared in rounds at the same place of equal texts, as far as both drafted.

    After a near-tie nothing of a round, or of a text, is compared: it continues another token.
    """

    prompts: int
    equal_texts: int
    rounds: int
    drafts: int
    equal_drafts: int
    near_ties: int
    """Drafts and texts that differ where rounding decides, before the first other difference."""
    first: Difference | None
    """The first difference that is no near-tie."""
    figures: dict[str, Any]
    """Acceptance of either side, by its name, under the names of each way of counting."""

    @property
    def equal(self) -> bool:
        return self.equal_texts + self.equal_drafts + self.near_ties == self.prompts + self.drafts


def compare(ours: Sequence[Transcript], theirs: Sequence[Transcript], names: tuple[str, str], near_tie: NearTie) -> Comparison:
    """Compare two transcripts per prompt; ``names`` are those of the two sides."""
    rounds = drafts = equal = ties = 0
    first = None
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True), 1):
        for one, found in _same_places(mine, other):
            pairs = list(zip(one.drafts, found.drafts, strict=False))
            if first is None and (depth := _parting(pairs)) is not None:
                if near_tie(mine.text[: one.position] + one.drafts[:depth], depth, pairs[depth]):
                    ties, pairs = ties + 1, pairs[: depth + 1]
                else:
                    first = Difference(number, one.position, depth, *pairs[depth])
            rounds, drafts, equal = rounds + 1, drafts + len(pairs), equal + sum(a == b for a, b in pairs)
        pairs = list(zip(mine.text, other.text, strict=False))
        if first is None and (place := _parting(pairs)) is not None:
            if near_tie(mine.text[:place], None, pairs[place]):
                ties += 1
            else:
                first = Difference(number, place, None, *pairs[place])
    texts = sum(mine.written == other.written for mine, other in zip(ours, theirs, strict=True))
    sides = dict(zip(names, (figures(ours), figures(theirs)), strict=True))
    return Comparison(len(ours), texts, rounds, drafts, equal, ties, first, sides)


def _same_places(ours: Transcript, theirs: Transcript) -> Iterator[tuple[Round, Round]]:
    """The rounds of both sides that continue the same text."""
    others = {one.position: one for one in theirs.rounds}
    for one in ours.rounds:
        if one.position in others and ours.text[: one.position] == theirs.text[: one.position]:
            yield one, others[one.position]


def _parting(pairs: Sequence[tuple[int, int]]) -> int | None:
    """The place of the first pair of different tokens."""
    return next((place for place, (one, other) in enumerate(pairs) if one != other), None)


def figures(transcripts: Sequence[Transcript]) -> dict[str, Any]:
    """Return the acceptance of transcripts as Headstart and as vLLM count it."""
    return {
        "tau": tau(transcripts),
        "mean_acceptance_length": mean_acceptance_length(transcripts),
        "acceptance_rate_per_pos": acceptance_rate_per_position(transcripts),
        "rounds": sum(len(one.rounds) for one in transcripts),
    }
