"""Beam search for one row, on the host, by the rules and in the arithmetic of transformers.

A step needs the most likely next tokens of each beam and their log-probabilities. Where scores are equal, which of them is taken depends
on torch's ``topk`` and on the sizes it is given, so these are those of transformers too; equal are many scores where few tokens are
allowed, since what is excluded is some number minus 1e9 in float32.

`Breadth` chooses how many drafts of each depth a pass verifies, from statistics gathered while decoding. A pass makes one more step at
each depth whose verified drafts include all beams of the next step. The drafts of a depth are ranked by the score of the whole sequence,
and a step needs all drafts up to the lowest-ranked of its new beams. With P_d(w) the probability that the first w drafts of depth d
suffice, verifying w_d drafts at each depth adds ``P_0(w_0) (1 + P_1(w_1) (1 + ...))`` expected steps.

Shape suffixes: K beams, C candidates, M most likely next tokens, V vocabulary, B rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.inference.beam.trie import TopK
from headstart.inference.engine.request import BeamRules, Request
from headstart.support.errors import UserError


class Steps:
    """The searches of one call, one for each row."""

    def __init__(self, request: Request, rules: BeamRules) -> None:
        self.request, self.rules = request, rules
        self.searches = [Search(request, rules, row) for row in range(len(request.ids_BT))]
        self.scores: list[list[Tensor]] = [[] for _ in range(len(self.searches) * rules.beams)]
        self.logits: list[list[Tensor]] = [[] for _ in range(len(self.searches) * rules.beams)]
        """By beam of the call and step, if the call asks for them."""
        self._step_scores: tuple[Tensor, ...] | None = () if request.scores else None

    def make(self, rows: list[int], top_k: list[list[TopK]]) -> None:
        """Make one step in each of these rows from the top k after each of its beams; all rows where criteria are asked about all."""
        searches = [self.searches[row] for row in rows]
        for row, search, of_beams in zip(rows, searches, top_k, strict=True):
            self._collect(row, of_beams)
            search.expand(of_beams)
        asked = [False] * len(rows) * self.rules.candidates
        if self.request.criteria:
            if self._step_scores is not None:
                self._step_scores += (torch.stack([one.scores_V.float() for of_beams in top_k for one in of_beams]),)
            asked = self.request.criteria(torch.cat([search.ids() for search in searches]), self._step_scores).tolist()
        for i, search in enumerate(searches):
            search.advance(asked[i * self.rules.candidates : (i + 1) * self.rules.candidates])

    def _collect(self, row: int, of_beams: list[TopK]) -> None:
        for beam, one in enumerate(of_beams, row * self.rules.beams):
            if self.request.scores:
                self.scores[beam].append(one.scores_V)
            if one.logits_V is not None:
                self.logits[beam].append(one.logits_V)

    def goes_on(self, row: int) -> bool:
        """True if the row is to be decoded further."""
        if self.request.in_order:
            return not all_over(self.searches, self.rules.early_stopping)
        return not self.searches[row].over

    # The output.

    def sequences(self) -> Tensor:
        """``[B * returned, T]``: the input ids, the best sequences of each row, and padding."""
        tokens = [beam.tokens for search in self.searches for beam in search.best[: self.rules.returned]]
        longest = max(map(len, tokens))
        written = [one + [self.rules.fill] * (longest - len(one)) for one in tokens]
        ids_BT = self.request.ids_BT.repeat_interleave(self.rules.returned, 0)
        return torch.cat([ids_BT, ids_BT.new_tensor(written).view(len(tokens), longest)], 1)

    def sequences_scores(self) -> Tensor:
        """The sum of log-probabilities of each sequence, with the length penalty."""
        scores = [beam.score for search in self.searches for beam in search.best[: self.rules.returned]]
        return torch.tensor(scores, dtype=torch.float32, device=self.request.ids_BT.device)

    def beam_indices(self) -> Tensor:
        """For each token of each sequence, the index in the whole batch of the beam it continued; -1 after the end."""
        indices = []
        for row, search in enumerate(self.searches):
            for beam in search.best[: self.rules.returned]:
                indices.append([origin + row * self.rules.beams for origin in beam.origins])
        longest = max(map(len, indices))
        padded = [row + [-1] * (longest - len(row)) for row in indices]
        return torch.tensor(padded, dtype=torch.int32, device=self.request.ids_BT.device).view(len(indices), longest)


UNITS = 36
"""Maximum number of drafts verified, in units of half the number of beams."""
DEPTHS = 12
"""Maximum number of depths drafted."""
PRIOR, MISSES, DEEPER = 2.0, 1.2, 0.8
"""A prior worth ``PRIOR`` steps: w drafts suffice with probability 1 - MISSES beams / w, times DEEPER for each further depth."""
DECAY = 0.995
"""Decay of the counts per pass, so that depths that were not drafted are retried."""


@dataclass(frozen=True)
class Plan:
    """``widths``: drafts verified at each depth; ``steps``: steps they are expected to add."""

    widths: tuple[int, ...]
    steps: float


class Breadth:
    """The statistics for one number of beams."""

    def __init__(self, beams: int) -> None:
        self.beams = beams
        self.unit = max(1, beams // 2)
        self.widths = self.unit * np.arange(UNITS + 1)
        prior = PRIOR * (1 - MISSES * beams / np.maximum(self.widths, 1)).clip(min=0)
        self.hits = np.stack([prior * DEEPER**depth for depth in range(DEPTHS)])
        """How often each width sufficed, by depth and width."""
        self.prior = self.hits.copy()
        self.seen = np.zeros(DEPTHS)
        """Steps counted at each depth."""

    def learn(self, depth: int, need: int | None) -> None:
        """Record that a step needed the first ``need`` drafts of that depth; None: all of them did not suffice."""
        self.seen[depth] += 1
        if need is not None:
            self.hits[depth] += self.widths >= need

    def fade(self) -> None:
        """Decay the counts; called once per pass."""
        self.hits = self.prior + DECAY * (self.hits - self.prior)
        self.seen *= DECAY

    def plans(self, depths: int) -> list[Plan]:
        """The best plan for each budget of 0, 1, ..., `UNITS` units, over at most ``depths`` depths."""
        probs = self.hits / (PRIOR + self.seen[:, None])
        remaining = np.subtract.outer(np.arange(UNITS + 1), np.arange(UNITS + 1))  # [units available, units taken]
        steps = np.zeros(UNITS + 1)
        choices: list[np.ndarray] = []
        for depth in reversed(range(min(depths, DEPTHS))):
            values = np.where(remaining >= 0, probs[depth] * (1 + steps[remaining.clip(min=0)]), -1.0)
            choices.append(values.argmax(1))
            steps = values.max(1)
        return [Plan(self._follow(choices[::-1], units), float(steps[units])) for units in range(UNITS + 1)]

    def _follow(self, choices: list[np.ndarray], units: int) -> tuple[int, ...]:
        widths: list[int] = []
        for choice in choices:
            taken = int(choice[units])
            if not taken:
                break
            widths.append(taken * self.unit)
            units -= taken
        return tuple(widths)


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
