"""What engines drafted and wrote for the same prompts, acceptance as they count it, and a comparison of two, token by token.

A round is one draft and the forward pass that verifies it. vLLM counts all drafts that a round kept; Headstart counts the tokens
written, which are fewer in the last round if the end of the text cuts it.

A `Verdict` is the outcome of a verification, in words and as data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstart.serving.reference import Agreement


@dataclass(frozen=True)
class Round:
    """One draft, a chain: ``drafts`` continue the first ``position`` tokens (prompt, written tokens and root)."""

    position: int
    """Number of tokens that the drafts continue; the last of them is the root."""
    drafts: tuple[int, ...]
    kept: int
    """Leading drafts that equal the tokens of the backbone, whether or not they were written."""


@dataclass(frozen=True)
class Transcript:
    """One prompt, the text written after it, and the rounds that wrote it."""

    prompt: tuple[int, ...]
    written: tuple[int, ...]
    rounds: tuple[Round, ...]

    @property
    def text(self) -> tuple[int, ...]:
        """Return the prompt and what was written."""
        return self.prompt + self.written


def mean_acceptance_length(transcripts: Sequence[Transcript]) -> float:
    """Return drafts kept per round plus one, as vLLM reports it; 1 without rounds."""
    rounds = [one for transcript in transcripts for one in transcript.rounds]
    return 1 + sum(one.kept for one in rounds) / max(len(rounds), 1)


def tau(transcripts: Sequence[Transcript]) -> float:
    """Return the tokens written per round, the backbone's own token included, as `headstart bench` reports it; 1 without rounds."""
    written = rounds = 0
    for transcript in transcripts:
        end = len(transcript.text)
        written += sum(min(one.kept + 1, end - one.position) for one in transcript.rounds)
        rounds += len(transcript.rounds)
    return written / rounds if rounds else 1.0


def acceptance_rate_per_position(transcripts: Sequence[Transcript]) -> list[float]:
    """Return for each draft position the share of rounds that kept it, as vLLM's metric of that name."""
    rounds = [one for transcript in transcripts for one in transcript.rounds]
    longest = max((len(one.drafts) for one in rounds), default=0)
    return [sum(one.kept > i for one in rounds) / len(rounds) for i in range(longest)]


# An engine decodes greedily in fp32, one prompt at a time, with a chain of drafts per round.


@dataclass(frozen=True)
class EngineSettings:
    """What all engines of a comparison are given."""

    depth: int
    """Tokens drafted per round, in a chain."""
    new_tokens: int
    """Tokens to write after each prompt, unless an end token is written before."""
    end_tokens: tuple[int, ...] = ()
    """Tokens that end a text; such a token is written. Empty: every text has ``new_tokens`` tokens."""

    def ended(self, tokens: Sequence[int]) -> list[int]:
        """Return what is written of these tokens."""
        written = list(tokens[: self.new_tokens])
        ends = [i for i, token in enumerate(written) if token in self.end_tokens]
        return written[: ends[0] + 1] if ends else written


def judged(position: int, drafts: Sequence[int], text: Sequence[int]) -> Round:
    """Return the round of drafts after so many tokens of a text."""
    hits = [drafted == true for drafted, true in zip(drafts, text[position:], strict=False)]
    return Round(position, tuple(drafts), hits.index(False) if False in hits else len(hits))


Engine = Callable[[Path, str, list[list[int]], EngineSettings], list[Transcript]]
"""Decodes prompts with the heads in a folder on a model (a folder or hub id): one transcript per prompt, with a round for each draft.

Raises UserError, in one line, if the engine is not installed, or does not load these heads. Engines may draft a different number of tokens
past the end of a text, which comparisons ignore.
"""

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


@dataclass
class Verdict:
    """What was compared, whether it agrees, and if not, the likely cause."""

    folder: str
    heads: str | None
    """The original heads, if they are there."""
    engine: str
    backbone: str
    method: str = ""
    prompts: str = ""
    """How many prompts the figures are of, where they are from, and how they were decoded."""
    reference: Agreement | None = None
    """The drafts of the folder against those of the trained heads; None: there are none to compare with, or the files cannot be read."""
    comparison: Comparison | None = None
    """The drafts of an engine; None: it was not asked, or refuses the folder."""
    faults: list[str] = field(default_factory=list)
    """What the files say that cannot be right."""
    changes: list[str] = field(default_factory=list)
    """What differs from the original heads."""
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        return self.reference is not None or self.comparison is not None

    @property
    def equal(self) -> bool:
        """Whether all that was compared agrees, and the files have no fault."""
        agree = self.reference is None or self.reference.whole
        asked = self.engine == "reference" or (self.comparison is not None and self.comparison.equal)
        return agree and asked and not self.faults

    @property
    def cause(self) -> str | None:
        """The likely cause of a difference; None if there is none."""
        unknown = "no cause was found" if self.heads else "not known: give the original heads with --heads to see what differs"
        return None if self.equal else next(iter([*self.faults, *self.changes, unknown]))

    def lines(self) -> Iterator[str]:
        """Yield the verdict for people."""
        word = "EQUAL" if self.equal else "DIFFERENT"
        if not self.compared and not self.faults:
            word = "NO FAULT FOUND"
        how = "read back" if self.engine == "reference" else f"{self.engine} engine"
        yield f"{word}: {self.folder} ({self.method or 'not readable'}), {how}, on {self.backbone}"
        if self.cause is not None:
            yield f"likely cause: {self.cause}"
        yield from (f"in the files: {fault}" for fault in self.faults if fault != self.cause)
        yield from (f"against the original heads: {change}" for change in self.changes if change != self.cause)
        if (one := self.reference) is not None:
            logits = f"their logits differ by at most {one.distance:.1e} of the largest one"
            yield f"{one.equal} of {one.drafts} drafts are those of the trained heads, {logits}"
        elif not self.faults:
            yield "the export stored no drafts to compare with: give the original heads with --heads, or measure it (headstart import)"
        yield from self._figures()
        yield from (f"note: {note}" for note in self.notes)

    def _figures(self) -> Iterator[str]:
        one = self.comparison
        if one is None:
            return
        sides = " and ".join(one.figures)
        yield f"{sides}: {one.prompts} prompts, {one.equal_texts} equal texts; {one.equal_drafts} of {one.drafts} drafts equal"
        if one.near_ties:
            yield f"near-ties: {one.near_ties} of the differences are between tokens about equally likely, which rounding decides"
        if (first := one.first) is not None:
            tokens = " and ".join(f"{side} {token}" for side, token in zip(one.figures, (first.ours, first.theirs), strict=True))
            what = "the text" if first.depth is None else f"depth {first.depth}"
            yield f"first difference: prompt {first.prompt}, after {first.position} tokens, {what}: tokens {tokens}"
        yield f"measured on {self.prompts}"
        for side, figures in one.figures.items():
            rates = " ".join(f"{rate:.3f}" for rate in figures["acceptance_rate_per_pos"])
            yield (
                f"{side}: tau {figures['tau']:.3f}, mean acceptance length {figures['mean_acceptance_length']:.3f}, "
                f"acceptance rate per position {rates}, {figures['rounds']} rounds"
            )

    def report(self) -> dict[str, Any]:
        """Return the verdict as data."""
        own = ("folder", "heads", "engine", "backbone", "method", "prompts", "compared", "faults", "changes", "notes")
        stated = {name: getattr(self, name) for name in own}
        reference = None if self.reference is None else self.reference._asdict()
        comparison = None if self.comparison is None else asdict(self.comparison)
        return {"equal": self.equal, "cause": self.cause, **stated, "reference": reference, "comparison": comparison}
