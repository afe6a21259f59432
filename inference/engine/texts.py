"""The tokens written for the rows of a call, and where they end, on the host.

transformers writes a token to every row at each step, asks the stopping criteria about all rows, and hands the tokens to the streamer. Here
rows have different numbers of tokens after a pass; a step is taken once every row has its token. Where each row is judged by itself,
nothing waits for the others.

Shape suffixes: B batch, T positions, P tokens of a run, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.inference.engine.processing import History
from headstart.inference.engine.request import Request


class Texts:
    """The texts of one call."""

    def __init__(self, request: Request) -> None:
        self.request, self.prompts_BT = request, request.ids_BT
        rows = len(self.prompts_BT)
        self.written: list[list[int]] = [[] for _ in range(rows)]
        self.ended = [False] * rows
        """Rows that need no more tokens."""
        self.scores: list[list[Tensor]] = [[] for _ in range(rows)]
        self.logits: list[list[Tensor]] = [[] for _ in range(rows)]
        """Processed scores and logits ``[V]`` of each row's tokens, if the call asks for them."""
        self.ids_BT = self.prompts_BT
        """The ids after the steps taken, as transformers passes them on; kept where `Request.in_steps`."""
        self._done, self._steps = [False] * rows, 0
        self._step_scores: tuple[Tensor, ...] | None = () if request.scores else None

    def ids(self, row: int) -> Tensor:
        """The prompt and the tokens of a row ``[T]``."""
        return torch.cat([self.prompts_BT[row], self.prompts_BT.new_tensor(self.written[row])])

    def history(self, row: int) -> History:
        return History(self.prompts_BT[row], list(self.written[row]), row, self._ends)

    def histories(self) -> list[History]:
        """The texts of all rows."""
        return [self.history(row) for row in range(len(self.written))]

    def goes_on(self, row: int) -> bool:
        """True if the row is to be decoded further."""
        return not all(self.ended) if self.request.in_order else not self.ended[row]

    def write(self, rows: Sequence[int], runs: list[list[int]], scores: list[Tensor], logits: list[Tensor]) -> list[list[int]]:
        """Add a run of tokens to each of these rows, with their scores and logits ``[P, V]`` (empty lists: not asked for).

        Returns the tokens that were kept: those up to the end of each row.
        """
        before = [len(self.written[row]) for row in rows]
        for b, (row, run) in enumerate(zip(rows, runs, strict=True)):
            count = self._append(row, run)
            for kept, given in ((self.scores, scores), (self.logits, logits)):
                if given:
                    kept[row].extend(given[b][: len(run) if self.request.in_order else count].float())
        while self.request.in_steps and self._step():
            pass
        return [self.written[row][start:] for row, start in zip(rows, before, strict=True)]

    def _append(self, row: int, run: list[int]) -> int:
        """Add tokens until one ends the row; returns the number added."""
        if self._done[row] and self.request.padded:
            return 0
        for count, token in enumerate(run, 1):
            self.written[row].append(token)
            self.ended[row] = self._ends(self.written[row])
            if not self.request.in_steps and self.request.criteria:
                self.ended[row] |= bool(self.request.criteria(self.ids(row)[None], None).any())
            if self.ended[row]:
                return count
        return len(run)

    def _ends(self, written: list[int]) -> bool:
        return written[-1] in self.request.eos or self.prompts_BT.shape[1] + len(written) >= self.request.limit

    def _step(self) -> bool:
        """Take a step if every row has a token for it; returns False if one has none, or if all rows have ended."""
        request, step, tokens = self.request, self._steps, []
        if all(self._done):
            return False
        for row, written in enumerate(self.written):
            padded = self._done[row] and request.padded
            if not padded and len(written) <= step:
                return False
            tokens.append(request.pad_token if padded else written[step])
        self._steps += 1
        self._judge(torch.tensor(tokens, device=self.ids_BT.device))
        if all(self._done) or request.padded:
            for row, done in enumerate(self._done):
                if done and not (self.ended[row] and len(self.written[row]) <= self._steps):
                    self._cut(row)
        return True

    def _judge(self, tokens_B: Tensor) -> None:
        """Mark the rows that end with these tokens, and hand the tokens to the streamer."""
        request = self.request
        over = self.prompts_BT.shape[1] + self._steps >= request.limit
        ends = [over or token in request.eos for token in tokens_B.tolist()]
        if request.criteria or request.processing.unknown:
            self.ids_BT = torch.cat([self.ids_BT, tokens_B.to(self.ids_BT.dtype)[:, None]], 1)
        if request.criteria:
            if self._step_scores is not None:
                self._step_scores += (self._scores_of_step(),)
            asked = request.criteria(self.ids_BT, self._step_scores).tolist()
            ends = [one or other for one, other in zip(ends, asked, strict=True)]
        self._done = [done or end for done, end in zip(self._done, ends, strict=True)]
        if request.streamer is not None:
            request.streamer.put(tokens_B.cpu())

    def _scores_of_step(self) -> Tensor:
        """The scores ``[B, V]`` of the last step; zeros for rows that had ended."""
        step = self._steps - 1
        own = [scores[step] if len(scores) > step else None for scores in self.scores]
        like = next(one for one in own if one is not None)
        return torch.stack([torch.zeros_like(like) if one is None else one for one in own])

    def _cut(self, row: int) -> None:
        """End a row with the last step."""
        self.ended[row] = True
        for kept in (self.written, self.scores, self.logits):
            del kept[row][self._steps :]

    def sequences(self) -> Tensor:
        """All rows as ``generate`` returns them: the input ids, the tokens written, and padding on the right."""
        longest = max(map(len, self.written))
        written = [tokens + [self.request.pad_token] * (longest - len(tokens)) for tokens in self.written]
        return torch.cat([self.prompts_BT, self.prompts_BT.new_tensor(written)], 1)
