"""What two engines drafted for the same prompts, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.inference.serving.transcript import Transcript, acceptance_rate_per_position, mean_acceptance_length, tau


@dataclass(frozen=True)
class Difference:
    """The first draft that differs."""

    prompt: int
    """Number of the prompt, from 1."""
    position: int
    """Tokens before the draft."""
    depth: int
    ours: int
    theirs: int
    """The token that either side drafts."""


@dataclass(frozen=True)
class Comparison:
    """Counts over all prompts. Drafts are compared in rounds at the same place of equal texts, as far as both drafted."""

    prompts: int
    equal_texts: int
    rounds: int
    drafts: int
    equal_drafts: int
    first: Difference | None
    figures: dict[str, Any]
    """Acceptance of either side, by its name, under the names of each way of counting."""

    @property
    def equal(self) -> bool:
        return self.equal_texts == self.prompts and self.equal_drafts == self.drafts


def compare(ours: Sequence[Transcript], theirs: Sequence[Transcript], names: tuple[str, str]) -> Comparison:
    """Compare two transcripts per prompt; ``names`` are those of the two sides."""
    rounds = drafts = equal = 0
    first = None
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True), 1):
        others = {one.position: one.drafts for one in other.rounds}
        for one in mine.rounds:
            if one.position not in others or mine.text[: one.position] != other.text[: one.position]:
                continue
            rounds += 1
            for depth, (draft, found) in enumerate(zip(one.drafts, others[one.position], strict=False)):
                drafts, equal = drafts + 1, equal + (draft == found)
                if draft != found and first is None:
                    first = Difference(number, one.position, depth, draft, found)
    texts = sum(mine.written == other.written for mine, other in zip(ours, theirs, strict=True))
    sides = dict(zip(names, (figures(ours), figures(theirs)), strict=True))
    return Comparison(len(ours), texts, rounds, drafts, equal, first, sides)


def figures(transcripts: Sequence[Transcript]) -> dict[str, Any]:
    """Return the acceptance of transcripts as Headstart and as vLLM count it."""
    return {
        "tau": tau(transcripts),
        "mean_acceptance_length": mean_acceptance_length(transcripts),
        "acceptance_rate_per_pos": acceptance_rate_per_position(transcripts),
        "rounds": sum(len(one.rounds) for one in transcripts),
    }
