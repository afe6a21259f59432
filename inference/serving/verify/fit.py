"""Which drafts are expected at which places of some texts, and how far a reading of the files gives them.

Shape suffixes: K depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.heads.base import Drafter
from headstart.inference.serving.layouts.reader.base import Reading, Target, Text
from headstart.inference.serving.verify.decode import headstart_logits
from headstart.inference.serving.verify.drafts import Transcript

TEXTS, ROUNDS = 2, 4
"""How much of the transcripts is enough to tell readings apart by Headstart's drafts."""
PLACES = 24
"""At how many places of each text drafts are compared with the text itself."""
TOLERANCE = 2e-4
"""The largest difference of logits that fp32 arithmetic in another order makes, relative to the largest logit."""


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
    written: bool = False
    """Whether these are tokens of the text in place of drafts."""


def fit_of(reading: Reading, target: Target, texts: Sequence[Expected], first_only: bool = False) -> Fit | None:
    """Draft by this reading at all places, or only up to the first difference; None if its tensors do not fit one another."""
    drafted = equal = 0
    distances = []
    try:
        for one in texts:
            with torch.no_grad():
                reader = reading.on(target, one.text)
            for position, expected in one.drafts.items():
                tokens = expected[: reader.max_depth]
                if one.written:
                    hits = [a == b for a, b in zip(reader.draft(position, len(tokens)), tokens, strict=True)]
                else:
                    found_KV = reader.logits_at(position, tokens)
                    hits = are_picks(found_KV, tokens)
                    if (wanted_KV := one.logits.get(position)) is not None:
                        distances.append(_distance(found_KV, wanted_KV))
                drafted, equal = drafted + len(hits), equal + sum(hits)
                fit = Fit(equal / drafted, drafted, max(distances, default=None))
                if first_only and not fit.whole:
                    return fit
    except (RuntimeError, IndexError, KeyError):
        return None
    return fit if drafted else None


def are_picks(logits_KV: Tensor, tokens: Sequence[int]) -> list[bool]:
    """Whether each token is the most likely one, or as likely but for rounding."""
    rounding_K = TOLERANCE * logits_KV.where(logits_KV.isfinite(), 0.0).abs().amax(-1)
    own_K = logits_KV.gather(-1, torch.tensor(tokens, device=logits_KV.device)[:, None])[:, 0]
    picks: list[bool] = (own_K >= logits_KV.amax(-1) - rounding_K).tolist()
    return picks


@torch.no_grad()
def near_tie(reading: Reading, target: Target, given: Sequence[int], depth: int | None, tokens: tuple[int, int]) -> bool:
    """See `NearTie`: by the logits of a reading, and for the text by the backbone's own."""
    if depth is None:
        logits_V = target.logits(target.read(given, ()).hidden_TD[-1])
    else:
        place = len(given) - depth
        reader = reading.on(target, target.read(given[:place], reading.taps))
        logits_V = reader.logits_at(place, [*given[place:], tokens[0]])[-1]
    return all(are_picks(logits_V.expand(2, -1), tokens))


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


def expected_texts(target: Target, transcripts: Sequence[Transcript], depth: int) -> list[Expected]:
    """Expect what the backbone wrote, where nothing else is known: the right reading drafts more of it than a wrong one."""
    texts = []
    for one in transcripts:
        places = range(len(one.prompt) + 1, len(one.text) - depth + 1)[:PLACES]
        drafts = {place: one.text[place : place + depth] for place in places}
        texts.append(Expected(target.read(one.text, range(target.num_layers + 1)), drafts, written=True))
    return texts
