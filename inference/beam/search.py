"""Beam search for one row, on the host, by the rules of transformers.

A step needs only the most likely next tokens of each beam and their log-probabilities, so its result does not depend on how they were
computed. Scores are summed in float32, as in transformers.

Shape suffixes: T positions, K beams, M most likely next tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from headstart.inference.engine.beam_rules import BeamRules
from headstart.inference.engine.request import Request
from headstart.support.errors import UserError

EXCLUDED = np.float32(-1e9)
"""Added to the score of a beam that is no longer a candidate."""


@dataclass(frozen=True)
class Beam:
    """The tokens written after the prompt."""

    tokens: list[int]
    score: np.float32
    """The sum of its log-probabilities; once it has ended, with the length penalty."""
    origins: list[int]
    """The beam that each token continued."""
    ended: bool = False


class Search:
    """The search of one row: its running beams, best first, and the best sequences that have ended so far."""

    def __init__(self, request: Request, rules: BeamRules, row: int) -> None:
        self.request, self.rules = request, rules
        self.prompt_T = request.ids_BT[row]
        self.running = [Beam([], np.float32(0) if beam == 0 else EXCLUDED, []) for beam in range(rules.beams)]
        self.best = [Beam([], EXCLUDED, []) for _ in range(rules.beams)]
        """Entries that have not `ended` are placeholders."""
        self.over = False

    def step(self, logprobs_KM: np.ndarray, tokens_KM: np.ndarray) -> None:
        """Continue the beams, given the most likely next tokens of each (M must be at least the number of candidates)."""
        if np.isneginf(logprobs_KM).all():
            raise UserError("the logits processors rule out every token after every beam; allow some, such as the one that ends a sequence")
        scores_K1 = np.array([beam.score for beam in self.running], np.float32)[:, None]
        totals = (logprobs_KM + scores_K1).ravel()
        chosen = _best(totals, self.rules.candidates)
        totals, tokens = totals[chosen], tokens_KM.ravel()[chosen]
        origins = (chosen // logprobs_KM.shape[1]).tolist()
        candidates = [
            Beam([*self.running[origin].tokens, token], total, [*self.running[origin].origins, origin])
            for origin, token, total in zip(origins, tokens.tolist(), totals, strict=True)
        ]
        ends = self._ends(candidates)
        going = totals + ends * EXCLUDED
        self.running = [replace(candidates[i], score=going[i]) for i in _best(going, self.rules.beams)]
        self._end(candidates, totals, ends)
        full = self.rules.early_stopping is True and all(beam.ended for beam in self.best)
        # transformers adds nothing to a finished row while the other rows of the batch continue.
        self.over = full or not self._may_improve() or bool(ends.all())

    def _ends(self, candidates: list[Beam]) -> np.ndarray:
        """A mask of the candidates that have ended."""
        request, length = self.request, len(candidates[0].tokens)
        if len(self.prompt_T) + length >= request.limit:
            return np.ones(len(candidates), dtype=np.bool_)
        ends = np.array([beam.tokens[-1] in request.eos for beam in candidates])
        if request.criteria:
            written = self.prompt_T.new_tensor([beam.tokens for beam in candidates])
            ids = torch.cat([self.prompt_T.expand(len(candidates), -1), written], 1)
            ends |= request.criteria(ids, None).cpu().numpy()
        return ends

    def _end(self, candidates: list[Beam], totals: np.ndarray, ends: np.ndarray) -> None:
        """Merge the ended candidates into the best sequences; only the first ``beams`` candidates are eligible."""
        beams = self.rules.beams
        scores = totals / self._penalty(len(candidates[0].tokens))
        eligible = ends & (np.arange(len(candidates)) < beams)
        merged = self.best + [replace(candidates[i], score=scores[i], ended=True) for i in eligible.nonzero()[0].tolist()]
        self.best = [merged[i] for i in _best(np.array([beam.score for beam in merged], np.float32), beams)]

    def _may_improve(self) -> bool:
        """True if the best running beam may still beat the worst ended one, by transformers' estimate of its length."""
        length = len(self.running[0].tokens)
        if self.rules.early_stopping == "never" and self.rules.length_penalty > 0:
            length = self.rules.longest - len(self.prompt_T)
        bound = self.running[0].score / self._penalty(length)
        worst = min(beam.score for beam in self.best)
        return any(bound > (worst if beam.ended else EXCLUDED) for beam in self.best)

    def _penalty(self, length: int) -> np.float32:
        return np.float32(length**self.rules.length_penalty)


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """The indices of the largest scores, largest first; ties keep their order."""
    return np.argsort(-scores, kind="stable")[:count]
