"""Beam search itself, on the host: transformers' rules, step by step, for one row.

A step needs of each beam the likeliest next tokens and their log-probabilities, nothing else, so that it gives what it gives
however those came about. Sums are made in float32, as transformers makes them.

Shape suffixes: T positions, K beams, M likeliest next tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from headstart.inference.beam.rules import BeamRules
from headstart.inference.engine.request import Request
from headstart.support.errors import UserError

OUT = np.float32(-1e9)
"""What is added to the score of a text that is out of the running."""


@dataclass(frozen=True)
class Beam:
    """What was written after the prompt."""

    tokens: list[int]
    score: np.float32
    """The sum of its log-probabilities; of an ended one, with the length penalty."""
    places: list[int]
    """For each token, which beam it continued."""
    ended: bool = False


class Search:
    """One row: its beams, best first, and the best texts that have ended so far."""

    def __init__(self, request: Request, rules: BeamRules, row: int) -> None:
        self.request, self.rules = request, rules
        self.prompt_T = request.ids_BT[row]
        self.running = [Beam([], np.float32(0) if beam == 0 else OUT, []) for beam in range(rules.beams)]
        self.best = [Beam([], OUT, []) for _ in range(rules.beams)]
        """Those that have not `ended` are no texts yet."""
        self.over = False

    def step(self, logprobs_KM: np.ndarray, tokens_KM: np.ndarray) -> None:
        """Continue the beams, given of each the likeliest next tokens, at least as many as there are candidates."""
        if np.isneginf(logprobs_KM).all():
            raise UserError("the logits processors rule out every token after every beam; allow some, such as the one that ends a text")
        scores_K1 = np.array([beam.score for beam in self.running], np.float32)[:, None]
        totals = (logprobs_KM + scores_K1).ravel()
        chosen = _best(totals, self.rules.candidates)
        totals, tokens = totals[chosen], tokens_KM.ravel()[chosen]
        places = (chosen // logprobs_KM.shape[1]).tolist()
        found = [
            Beam([*self.running[place].tokens, token], total, [*self.running[place].places, place])
            for place, token, total in zip(places, tokens.tolist(), totals, strict=True)
        ]
        ends = self._ends(found)
        going = totals + ends * OUT
        self.running = [replace(found[i], score=going[i]) for i in _best(going, self.rules.beams)]
        self._end(found, totals, ends)
        full = self.rules.early_stopping is True and all(beam.ended for beam in self.best)
        # Of a row that is over, transformers lets no more texts in while it waits for the other rows of a batch.
        self.over = full or not self._may_improve() or bool(ends.all())

    def _ends(self, found: list[Beam]) -> np.ndarray:
        """Which of them are complete."""
        request, length = self.request, len(found[0].tokens)
        if len(self.prompt_T) + length >= request.limit:
            return np.ones(len(found), dtype=np.bool_)
        ends = np.array([beam.tokens[-1] in request.eos for beam in found])
        if request.criteria:
            written = self.prompt_T.new_tensor([beam.tokens for beam in found])
            ids = torch.cat([self.prompt_T.expand(len(found), -1), written], 1)
            ends |= request.criteria(ids, None).cpu().numpy()
        return ends

    def _end(self, found: list[Beam], totals: np.ndarray, ends: np.ndarray) -> None:
        """Let the best of the ended ones into the list; those beyond the first ``beams`` candidates have no claim to it."""
        beams = self.rules.beams
        scores = totals / self._penalty(len(found[0].tokens))
        claims = ends & (np.arange(len(found)) < beams)
        merged = self.best + [replace(found[i], score=scores[i], ended=True) for i in claims.nonzero()[0].tolist()]
        self.best = [merged[i] for i in _best(np.array([beam.score for beam in merged], np.float32), beams)]

    def _may_improve(self) -> bool:
        """Whether the best beam might still end better than the worst of the ended ones, by transformers' estimate of its length."""
        length = len(self.running[0].tokens)
        if self.rules.early_stopping == "never" and self.rules.length_penalty > 0:
            length = self.rules.longest - len(self.prompt_T)
        hope = self.running[0].score / self._penalty(length)
        worst = min(beam.score for beam in self.best)
        return any(hope > (worst if beam.ended else OUT) for beam in self.best)

    def _penalty(self, length: int) -> np.float32:
        return np.float32(length**self.rules.length_penalty)


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """The places of the largest, largest first; of equals the first."""
    return np.argsort(-scores, kind="stable")[:count]
