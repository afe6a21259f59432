"""Judges a written text by the uncaptured model: is every token the one that the decoding rule picks, up to rounding?

The text is teacher-forced: one pass without captures, drafts or a cache reads all of it, and the rule (`verify`, with the row's noise and
logits processors) is applied at every position. Where it picks another token, the judge finds by how much the logit of the written one
would have to be larger. A token that falls short by no more than the tolerance of `Rounding` is a near-tie, any other is a fault. Logits
that decoding kept are compared with those of this pass in the same way.

Shape suffixes: T positions, N positions judged at once, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.heads.backbone.backbone import Backbone
from headstart.heads.backbone.images import Images
from headstart.inference.engine.noise import gumbel
from headstart.inference.engine.processing import History, Processing
from headstart.inference.engine.rounding import Rounding, differences
from headstart.inference.engine.tree import chain, pick

MOST_LOGITS = 2**23
"""Logits held at once: the whole text's would not fit for large vocabularies."""
MOST_MEASURED = 4
"""Texts that rounding is measured on; one more only if a text is beyond what was measured."""
NOISE = 48.0
"""More than the noise of two tokens differs."""
HALVINGS = 30
"""Steps in which the shortfall of a token is found: to one part in 2^30 of the range of the logits."""


@dataclass(frozen=True)
class Text:
    """What was decoded for one prompt."""

    ids_T: Tensor
    """The prompt, padding included, and the tokens written."""
    written: int
    seed_1: Tensor | None
    """The row's seed; None: temperature 0."""
    processing: Processing
    pads: int = 0
    row: int = 0
    """The number of its row in the call."""
    images: Images | None = None

    @property
    def prompt(self) -> int:
        """The length of the prompt without padding."""
        return len(self.ids_T) - self.pads - self.written


@dataclass
class Judgement:
    """What was found about one text."""

    tokens: int
    shortfalls: dict[int, float] = field(default_factory=dict)
    """By number of each token that is not the pick: by how much its logit falls short."""
    differences: list[float] = field(default_factory=list)
    """The largest difference of the logits that decoding kept, at each of their positions."""

    @property
    def worst(self) -> tuple[float, int]:
        """The largest shortfall or difference, and the number of its token; infinity: no rounding explains it."""
        found = [*((size, number) for number, size in self.shortfalls.items()), *((size, i) for i, size in enumerate(self.differences))]
        return max(found, default=(0.0, 0))

    def faults(self, tolerance: float) -> list[int]:
        """The numbers of the tokens that fall short by more than the tolerance."""
        return [number for number, shortfall in self.shortfalls.items() if not shortfall <= tolerance]


class Judge:
    """Judges texts decoded on one backbone."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.rounding = backbone, Rounding(backbone)

    @torch.no_grad()
    def judge(self, text: Text, kept_NV: Tensor | None = None, seconds: float = math.inf) -> Judgement:
        """Judge a text; ``kept_NV``: the logits that its first tokens were chosen by.

        If something exceeds the rounding measured so far, rounding is measured on this text too, in about ``seconds``.
        """
        ids_T = text.ids_T[text.pads :].to(self.backbone.device)
        found = self._read(text, ids_T, kept_NV)
        size, number = found.worst
        if size > self.rounding.tolerance and self.rounding.texts < MOST_MEASURED:
            self.rounding.measure(ids_T[: text.prompt + number], text.prompt, seconds, text.images)
        return found

    def _read(self, text: Text, ids_T: Tensor, kept_NV: Tensor | None) -> Judgement:
        hidden_TD = self.backbone.read(ids_T[None, :-1], images=text.images).hidden_BTD[0]
        if text.prompt <= (turn := self.backbone.rope_limit or 0) < len(hidden_TD):  # decoded with other rotary frequencies up to there
            hidden_TD = torch.cat([self.backbone.read(ids_T[None, :turn]).hidden_BTD[0], hidden_TD[turn:]])
        found, step = Judgement(text.written), max(1, MOST_LOGITS // self.backbone.vocab)
        for first in range(0, text.written, step):
            end = min(first + step, text.written)
            at = text.prompt - 1 + first
            logits_NV = self.backbone.readout(hidden_TD[at : at + end - first])
            self.rounding.see(logits_NV)
            found.shortfalls |= _Piece(text, ids_T, first, logits_NV).shortfalls()
            if kept_NV is not None and first < len(kept_NV):
                kept = kept_NV[first:end].to(logits_NV.device).float()
                found.differences += differences(kept, logits_NV[: len(kept)].float()).tolist()
        return found


class _Piece:
    """Some tokens of a text, from number ``first`` on, and the logits before each."""

    def __init__(self, text: Text, ids_T: Tensor, first: int, logits_NV: Tensor) -> None:
        self.text, self.ids_T, self.logits_NV = text, ids_T, logits_NV
        self.at = text.prompt + first
        self.first, self.written_N = first, ids_T[self.at : self.at + len(logits_NV)]

    def shortfalls(self) -> dict[int, float]:
        """The shortfall of each token that is not the pick, by its number."""
        others = (self._picks(0, self.logits_NV) != self.written_N).nonzero()[:, 0].tolist()
        return {self.first + place: self._shortfall(place) for place in others}

    def _picks(self, place: int, logits_NV: Tensor) -> Tensor:
        """The picks ``[N]`` at the positions from ``place`` on."""
        count, at = len(logits_NV), self.at + place
        read = chain(self.ids_T[at - 1 : at - 1 + count].tolist())
        history = History(self.text.ids_T[: self.text.pads + at].to(logits_NV.device), [], self.text.row)
        scores_1NV, noise_1NV = self.text.processing(logits_NV[None], [history], read), None
        if self.text.seed_1 is not None:
            places_1N = torch.arange(at, at + count, device=logits_NV.device)[None]
            noise_1NV = gumbel(self.text.seed_1.to(logits_NV.device), places_1N, logits_NV.shape[-1])
        return pick(scores_1NV, noise_1NV)[0]

    def _shortfall(self, place: int) -> float:
        """By how much the logit of the written token would have to be larger for it to be the pick; infinity: however large."""
        token, logits_1V = self.written_N[place], self.logits_NV[place : place + 1].float()

        def is_pick(raised: float) -> bool:
            changed_1V = logits_1V.clone()
            changed_1V[0, token] += raised
            return bool(self._picks(place, changed_1V)[0] == token)

        low, high = 0.0, float(logits_1V.nan_to_num(0, 0, 0).abs().max()) * 2 + NOISE * self.text.processing.temperature
        if not is_pick(high):
            return math.inf
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if is_pick(middle) else (middle, high)
        return high
