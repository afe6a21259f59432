"""What an engine drafted and wrote for one prompt, and acceptance as Headstart and as the engines count it.

A round is one draft and the forward pass that verifies it. vLLM counts all drafts that a round kept; Headstart counts the tokens
written, which are fewer in the last round if the end of the text cuts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
