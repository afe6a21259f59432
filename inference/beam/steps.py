"""Steps of beam searches: candidates, what the user's stopping criteria say of them, and the scores that a call asks for.

Shape suffixes: B rows, C candidates, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.inference.beam.search import Search, all_over
from headstart.inference.beam.trie import TopK
from headstart.inference.engine.beam_rules import BeamRules
from headstart.inference.engine.request import Request


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
