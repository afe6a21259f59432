"""Beam search of some rows: the steps of transformers' ``_beam_search``, by its own methods.

Shape suffixes: B rows, K beams, C candidates, T positions, P positions after the prompt, V vocabulary, X several dimensions as one, Y what
is known after a token: the processed log-probabilities and, if the call asks for them, the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin

from headstart.inference.engine.request import BeamRules, Request
from headstart.support.errors import UserError

STEPS = GenerationMixin()
"""For its methods, which need no model."""
EXCLUDED = -1e9
"""The score of beams and sequences that are none yet, as in transformers."""


class Sequences(NamedTuple):
    """Sequences, prompt and padding included, their scores, and the beam that each token continued (-1: behind the end)."""

    ids_BKT: Tensor
    scores_BK: Tensor
    origins_BKP: Tensor

    def padded(self, count: int, fill: int) -> Sequences:
        """The same with ``count`` more positions."""
        return Sequences(F.pad(self.ids_BKT, (0, count), value=fill), self.scores_BK, F.pad(self.origins_BKP, (0, count), value=-1))


class Search:
    """The search of one row, or of all rows of a call that go on together: its running beams, best first, and the best that have ended."""

    def __init__(self, request: Request, rules: BeamRules, rows: list[int]) -> None:
        self.request, self.rules, self.rows, device = request, rules, rows, request.ids_BT.device
        ids_BKT = request.ids_BT[rows][:, None].expand(-1, rules.beams, -1)
        self.prompt = self.length = ids_BKT.shape[-1]
        excluded_BK = torch.full(ids_BKT.shape[:2], EXCLUDED, device=device)
        self.best = Sequences(ids_BKT, excluded_BK, torch.empty(*ids_BKT.shape[:2], 0, dtype=torch.int32, device=device))
        self.running = self.best._replace(scores_BK=torch.where(torch.arange(rules.beams, device=device) > 0, excluded_BK, 0.0))
        self.finished_BK = torch.zeros_like(excluded_BK, dtype=torch.bool)
        """For each of the best, whether it has ended; the others are placeholders."""
        self.may_improve_B1 = torch.ones_like(self.finished_BK[:, :1])
        """False once no running beam can beat the best, by transformers' estimate."""
        self.going = True
        self.after: list[Tensor] = []
        """What was known after each beam at each step ``[B, K, Y, V]``, if the call asks for it."""
        self._scores: tuple[Tensor, ...] | None = () if request.scores else None

    def step(self, after_BKYV: Tensor) -> None:
        """Make a step from what is known after each beam."""
        self.after += [after_BKYV] if self.request.scores or self.request.logits else []
        scores_BKV = after_BKYV[:, :, 0]
        if bool(scores_BKV.isneginf().flatten(1).all(1).any()):
            raise UserError("the logits processors rule out every token after every beam; allow some, such as the one that ends a sequence")
        rules, B, early, penalty = self.rules, len(self.rows), self.rules.early_stopping, self.rules.length_penalty
        running, best = (kept.padded(1, rules.fill) for kept in (self.running, self.best))
        candidates_BC = STEPS._get_top_k_continuations(
            accumulated_log_probs=(scores_BKV + running.scores_BK[..., None]).flatten(1),
            running_sequences=running.ids_BKT,
            running_beam_indices=running.origins_BKP,
            cur_len=self.length,
            decoder_prompt_len=self.prompt,
            do_sample=False,
            beams_to_keep=rules.candidates,
            num_beams=rules.beams,
            batch_size=B,
        )
        totals_BC, ids_BCT, origins_BCP = candidates_BC
        ends_BC = self._ends(ids_BCT, scores_BKV)
        self.running = Sequences(*STEPS._get_running_beams_for_next_iteration(*candidates_BC, ends_BC, rules.beams))
        *kept, self.finished_BK = STEPS._update_finished_beams(
            *(best.ids_BKT, ids_BCT, best.scores_BK, totals_BC, best.origins_BKP, origins_BCP),
            *(self.may_improve_B1, self.finished_BK, ends_BC, torch.arange(rules.candidates, device=ends_BC.device) < rules.beams),
            *(rules.beams, self.length, self.prompt, penalty, early),
        )
        self.best, self.length = Sequences(*kept), self.length + 1
        scores = self.running.scores_BK, self.best.scores_BK, self.finished_BK
        lengths = self.length, rules.longest, self.prompt
        self.may_improve_B1 = STEPS._check_early_stop_heuristic(self.may_improve_B1, *scores, *lengths, early, penalty)
        self.going = bool(STEPS._beam_search_has_unfinished_sequences(self.may_improve_B1, self.finished_BK, ends_BC, early))

    def _ends(self, ids_BCT: Tensor, scores_BKV: Tensor) -> Tensor:
        """Which candidates end: by an end token, by their length, or by a criterion of the user's own."""
        last_BC = ids_BCT[..., -1]
        ends_BC = torch.isin(last_BC, last_BC.new_tensor(sorted(self.request.eos))) | (self.length + 1 >= self.request.limit)
        if self.request.criteria:
            if self._scores is not None:
                self._scores += (scores_BKV.flatten(0, 1),)
            ends_BC |= self.request.criteria(ids_BCT.flatten(0, 1), self._scores).view(ends_BC.shape)
        return ends_BC

    def returned(self, length: int) -> Sequences:
        """The sequences that the call returns ``[B * returned, length]``; the beams that they continued are numbered over all rows."""
        ids_BKT, scores_BK, origins_BKP = self.best.padded(length - self.length, self.rules.fill)
        origins_BKP = torch.where(origins_BKP >= 0, origins_BKP + self.rows[0] * self.rules.beams, -1)
        return Sequences(*(value_BK[:, : self.rules.returned].flatten(0, 1) for value_BK in (ids_BKT, scores_BK, origins_BKP)))
