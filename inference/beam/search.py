"""Beam search for one row, on the host, by the rules and in the arithmetic of transformers.

A step needs the most likely next tokens of each beam and their log-probabilities. Where scores are equal, which of them is taken depends on
torch's ``topk`` and on the sizes it is given, so these are those of transformers too; equal are many scores where few tokens are allowed,
since what is excluded is some number minus 1e9 in float32.

Shape suffixes: K beams, C candidates, M most likely next tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.inference.beam.trie import TopK
from headstart.inference.engine.beam_rules import BeamRules
from headstart.inference.engine.request import Request
from headstart.support.errors import UserError

EXCLUDED = -1e9
"""Added to the score of a beam that is no longer a candidate."""
CLEAR = np.float32(-1e8)
"""Scores above are those of beams that are not excluded."""


@dataclass(frozen=True)
class Beam:
    """The tokens written after the prompt, and the beam that each of them continued."""

    tokens: list[int]
    origins: list[int]
    score: float
    """The sum of its log-probabilities; once it is among the best, with the length penalty."""


class Search:
    """The search of one row: its running beams, best first, and the best sequences so far."""

    def __init__(self, request: Request, rules: BeamRules, row: int) -> None:
        self.request, self.rules = request, rules
        self.prompt_T = request.ids_BT[row]
        self.running = [Beam([], [], 0.0 if beam == 0 else EXCLUDED) for beam in range(rules.beams)]
        self.best = [Beam([], [], EXCLUDED) for _ in range(rules.beams)]
        self.finished = [False] * rules.beams
        """For each of the best, whether it has ended; the others are placeholders."""
        self.may_improve = True
        """False once no running beam can beat the best, by transformers' estimate."""
        self.candidates: list[Beam] = []
        self.stuck = False
        """True if all candidates of the last step ended."""

    def expand(self, top_k: list[TopK]) -> None:
        """Find the candidates of the next step, given the most likely next tokens of each beam (M at least the number of candidates)."""
        logprobs_KM = np.stack([one.logprobs_M for one in top_k])
        if np.isneginf(logprobs_KM).all():
            raise UserError("the logits processors rule out every token after every beam; allow some, such as the one that ends a sequence")
        count = self.rules.candidates
        scores_K1 = np.array([beam.score for beam in self.running], np.float32)[:, None]
        totals = (logprobs_KM + scores_K1).ravel()
        order = np.argsort(-totals, kind="stable")[: count + 1]
        best = totals[order]
        if best[count - 1] > CLEAR and (best[1:] < best[:-1]).all():
            origins, tokens = order[:count] // logprobs_KM.shape[1], np.stack([one.tokens_M for one in top_k]).ravel()[order[:count]]
            found = zip(best[:count].tolist(), origins.tolist(), tokens.tolist(), strict=True)
        else:
            scores_KV = torch.stack([one.scores_V for one in top_k])
            chosen = (scores_KV + torch.from_numpy(scores_K1).to(scores_KV.device)).view(-1).topk(count)
            places = [divmod(place, scores_KV.shape[1]) for place in chosen.indices.tolist()]
            found = zip(chosen.values.tolist(), *zip(*places, strict=True), strict=True)
        self.candidates = [
            Beam([*self.running[origin].tokens, token], [*self.running[origin].origins, origin], score) for score, origin, token in found
        ]

    def ids(self) -> Tensor:
        """The ids of the candidates ``[C, T]``."""
        written = self.prompt_T.new_tensor([beam.tokens for beam in self.candidates])
        return torch.cat([self.prompt_T.expand(len(self.candidates), -1), written], 1)

    def advance(self, asked: list[bool]) -> None:
        """Make the step; ``asked``: for each candidate, whether a stopping criterion of the user's own ends it."""
        request, rules, candidates, length = self.request, self.rules, self.candidates, len(self.candidates[0].tokens)
        over = len(self.prompt_T) + length >= request.limit
        ends = [over or end or beam.tokens[-1] in request.eos for beam, end in zip(candidates, asked, strict=True)]
        totals_C, ends_C = torch.tensor([beam.score for beam in candidates], dtype=torch.float32), torch.tensor(ends)
        going_C = totals_C + ends_C.float() * EXCLUDED
        self.running = [_scored(candidates[i], going_C[i]) for i in going_C.topk(rules.beams).indices.tolist()]
        ended_C = ends_C & (torch.arange(len(candidates)) < rules.beams)
        scores_C = totals_C / length**rules.length_penalty
        scores_C = scores_C + float(all(self.finished) and rules.early_stopping is True) * EXCLUDED
        scores_C = scores_C + float(not self.may_improve) * EXCLUDED + (~ended_C).float() * EXCLUDED
        merged = torch.cat([torch.tensor([beam.score for beam in self.best], dtype=torch.float32), scores_C])
        sequences, finished = [*self.best, *candidates], [*self.finished, *ended_C.tolist()]
        chosen = merged.topk(rules.beams).indices.tolist()
        self.best, self.finished = [_scored(sequences[i], merged[i]) for i in chosen], [finished[i] for i in chosen]
        self.may_improve = self.may_improve and self._may_improve(length)
        self.stuck = all(ends)

    def _may_improve(self, length: int) -> bool:
        if self.rules.early_stopping == "never" and self.rules.length_penalty > 0:
            length = self.rules.longest - len(self.prompt_T)
        bound = np.float32(self.running[0].score) / np.float32(length**self.rules.length_penalty)
        worst = min(beam.score for beam in self.best)
        return any(bound > np.float32(worst if finished else EXCLUDED) for finished in self.finished)

    @property
    def full(self) -> bool:
        """True if all of the best have ended."""
        return all(self.finished)

    @property
    def over(self) -> bool:
        """True if the row by itself is done. In transformers it goes on with the others of its batch, and nothing is added to it."""
        return not self.may_improve or (self.full and self.rules.early_stopping is True) or self.stuck


def all_over(searches: list[Search], early_stopping: bool | str) -> bool:
    """True if transformers' search over these rows ends."""
    improving = any(search.may_improve for search in searches)
    full = all(search.full for search in searches) and early_stopping is True
    return not improving or full or all(search.stuck for search in searches)


def _scored(beam: Beam, score: Tensor) -> Beam:
    return Beam(beam.tokens, beam.origins, float(score))
