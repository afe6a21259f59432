"""The tokens written for each row of a call, and the end of a row, on the host.

Shape suffixes: B batch, T positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.inference.engine.processing import History
from headstart.inference.engine.request import Request


class DecodedSequence:
    """The tokens of one row; ids and lengths include padding, as transformers passes them to stopping criteria.

    ``limit``: the length at which it ends.
    """

    def __init__(self, request: Request, prompt_T: Tensor, pads: int, limit: int) -> None:
        self.request, self.prompt_T, self.pads, self.limit = request, prompt_T, pads, limit
        self.written: list[int] = []
        self.ended = False

    @property
    def ids_T(self) -> Tensor:
        """The prompt and the tokens written so far."""
        return torch.cat([self.prompt_T, self.prompt_T.new_tensor(self.written)])

    @property
    def history(self) -> History:
        return History(self.ids_T, self.pads)

    def write(self, tokens: list[int]) -> int:
        """Add tokens until one ends the sequence; returns the number added."""
        for count, token in enumerate(tokens, 1):
            self.written.append(token)
            if self.request.streamer is not None:
                self.request.streamer.put(torch.tensor([token]))
            if self._ends(token):
                self.ended = True
                return count
        return len(tokens)

    def _ends(self, token: int) -> bool:
        request = self.request
        if token in request.eos or len(self.prompt_T) + len(self.written) >= self.limit:
            return True
        return bool(request.criteria) and bool(request.criteria(self.ids_T[None], None).any())


def output_ids(sequences: list[DecodedSequence], request: Request) -> Tensor:
    """All rows as ``generate`` returns them: the input ids, the tokens written, and padding on the right."""
    longest = max(len(sequence.written) for sequence in sequences)
    written = [sequence.written + [request.pad_token] * (longest - len(sequence.written)) for sequence in sequences]
    return torch.cat([request.ids_BT, request.ids_BT.new_tensor(written)], 1)
