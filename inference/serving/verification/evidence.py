"""Which drafts are expected at which places of some texts, and how far a reading of the files gives them.

Shape suffixes: K depth, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.heads.base import Drafter
from headstart.inference.serving.reference.decode import draft_at, logits_at
from headstart.inference.serving.reference.methods import drafting_of
from headstart.inference.serving.reference.reading import Reading
from headstart.inference.serving.reference.target import Target, Text
from headstart.inference.serving.transcript import Transcript
from headstart.inference.serving.verification.headstart import headstart_logits

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


@dataclass(frozen=True)
class Evidence:
    """What is expected of heads on a backbone."""

    target: Target
    texts: Sequence[Expected]

    def fit(self, reading: Reading, first_only: bool = False) -> Fit | None:
        """Draft by this reading at all places, or only up to the first difference; None if its tensors do not fit one another."""
        drafted = equal = 0
        distances = []
        try:
            for one in self.texts:
                drafting = drafting_of(reading)(reading, self.target, one.text)
                for position, tokens in one.drafts.items():
                    if (wanted_KV := one.logits.get(position)) is not None:
                        found_KV = logits_at(drafting, position, tokens)
                        found = found_KV.argmax(-1).tolist()
                        distances.append(_distance(found_KV, wanted_KV))
                    else:
                        found = draft_at(drafting, position, min(len(tokens), drafting.max_depth or len(tokens)))
                    drafted, equal = drafted + len(found), equal + sum(a == b for a, b in zip(found, tokens, strict=False))
                    fit = Fit(equal / drafted, drafted, max(distances, default=None))
                    if first_only and not fit.whole:
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


def evidence_of(target: Target, transcripts: Sequence[Transcript], drafter: Drafter | None = None) -> Evidence:
    """Expect what was drafted in the first rounds of some transcripts; with ``drafter``, its logits there too."""
    texts = []
    for one in transcripts[:TEXTS]:
        drafts = {r.position: r.drafts for r in one.rounds[:ROUNDS]}
        logits = {} if drafter is None else {p: headstart_logits(drafter, one.text[:p], tokens).cpu() for p, tokens in drafts.items()}
        texts.append(Expected(_whole(target, one), drafts, logits))
    return Evidence(target, texts)


def evidence_of_texts(target: Target, transcripts: Sequence[Transcript], depth: int) -> Evidence:
    """Expect what the backbone wrote, where nothing else is known: the right reading drafts more of it than a wrong one."""
    texts = []
    for one in transcripts:
        places = range(len(one.prompt) + 1, len(one.text) - depth + 1)[:PLACES]
        texts.append(Expected(_whole(target, one), {place: one.text[place : place + depth] for place in places}))
    return Evidence(target, texts)


@torch.no_grad()
def _whole(target: Target, one: Transcript) -> Text:
    return target.read(one.text, range(target.num_layers + 1))
