"""What the plain reading of heads drafts along a text, and how far a reading gives the drafts that are expected.

Shape suffixes: K depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.heads.base import Drafter
from headstart.serving.reference import TOLERANCE, are_picks, draft_logits
from headstart.serving.verify.drafts import EngineSettings, Round, Transcript
from plain.base import Reading, Target, Text

TEXTS, ROUNDS = 2, 4
"""How much of the transcripts is enough to tell readings apart."""


def judged(position: int, drafts: Sequence[int], text: Sequence[int]) -> Round:
    """Return the round of drafts after so many tokens of a text."""
    hits = [drafted == true for drafted, true in zip(drafts, text[position:], strict=False)]
    return Round(position, tuple(drafts), hits.index(False) if False in hits else len(hits))


def reference_drafts(reading: Reading, target: Target, prompts: Sequence[Sequence[int]], settings: EngineSettings) -> list[Transcript]:
    """Return a transcript per prompt, for a depth that the heads can draft.

    Every text is the backbone's own greedy continuation, so it is computed first, and the drafts at the places of its rounds afterwards.
    """
    return [_transcript(reading, target, list(prompt), settings) for prompt in prompts]


def _transcript(reading: Reading, target: Target, prompt: list[int], settings: EngineSettings) -> Transcript:
    room = (target.max_positions or 1 << 31) - len(prompt)
    text = [*prompt, *target.continued(prompt, min(settings.new_tokens + settings.depth, room))]
    with torch.no_grad():
        reader = reading.on(target, target.read(text, reading.taps))
    assert reader.max_depth is None or settings.depth <= reader.max_depth
    written, rounds, position = settings.ended(text[len(prompt) :]), [], len(prompt) + 1
    while position < len(prompt) + len(written):
        rounds.append(judged(position, reader.draft(position, settings.depth), text))
        position += rounds[-1].kept + 1
    return Transcript(tuple(prompt), tuple(written), tuple(rounds))


@dataclass(frozen=True)
class Fit:
    """How far a reading gives what is expected."""

    share: float
    """Share of the expected tokens that it drafts."""
    drafted: int
    """How many were expected."""
    distance: float | None = None
    """Largest difference of logits, relative to the largest one; None: no logits are known."""

    @property
    def whole(self) -> bool:
        return self.share == 1 and (self.distance is None or self.distance <= TOLERANCE)


@dataclass(frozen=True)
class Expected:
    """One text with the hidden states of every layer, and the drafts after some of its prefixes."""

    text: Text
    drafts: Mapping[int, tuple[int, ...]]
    logits: Mapping[int, Tensor] = field(default_factory=dict)
    """``[K, V]`` by position."""


def fit_of(reading: Reading, target: Target, texts: Sequence[Expected]) -> Fit | None:
    """Draft by this reading up to the first difference; None if its tensors do not fit one another."""
    drafted = equal = 0
    distances = []
    try:
        for one in texts:
            with torch.no_grad():
                reader = reading.on(target, one.text)
            for position, expected in one.drafts.items():
                tokens = expected[: reader.max_depth]
                found_KV = reader.logits_at(position, tokens)
                hits = are_picks(found_KV, tokens)
                if (wanted_KV := one.logits.get(position)) is not None:
                    distances.append(_distance(found_KV, wanted_KV))
                drafted, equal = drafted + len(hits), equal + sum(hits)
                fit = Fit(equal / drafted, drafted, max(distances, default=None))
                if not fit.whole:
                    return fit
    except (RuntimeError, IndexError, KeyError):
        return None
    return fit if drafted else None


def _distance(a_KV: Tensor, b_KV: Tensor) -> float:
    """The largest difference from the logits ``b``, relative to the largest one; infinite if other tokens can be drafted.

    An export may write the rows of tokens that are not drafted too, as long as none of them is the most likely.
    """
    finite = ~b_KV.isinf()
    largest_K1 = b_KV.max(-1, keepdim=True).values
    if a_KV.shape != b_KV.shape or bool(a_KV[finite].isinf().any()) or bool((a_KV > largest_K1)[~finite].any()):
        return float("inf")
    return float((a_KV[finite] - b_KV[finite]).abs().max() / b_KV[finite].abs().max().clamp(min=1e-6))


def expected_drafts(target: Target, transcripts: Sequence[Transcript], drafter: Drafter | None = None) -> list[Expected]:
    """Expect what was drafted in the first rounds of some transcripts; with ``drafter``, its logits there too."""
    texts = []
    for one in transcripts[:TEXTS]:
        drafts = {r.position: r.drafts for r in one.rounds[:ROUNDS]}
        logits = {} if drafter is None else {p: headstart_logits(drafter, one.text[:p], tokens).cpu() for p, tokens in drafts.items()}
        texts.append(Expected(target.read(one.text, range(target.num_layers + 1)), drafts, logits))
    return texts


@torch.no_grad()
def headstart_logits(drafter: Drafter, text: Sequence[int], drafts: Sequence[int]) -> Tensor:
    """Return Headstart's logits ``[K, V]`` of each draft after the text, given the drafts before it."""
    tokens_1T = torch.tensor([text], device=drafter.backbone.device)
    return draft_logits(drafter, drafter.backbone.read(tokens_1T[:, :-1], taps=drafter.taps), int(text[-1]), len(drafts), drafts)
